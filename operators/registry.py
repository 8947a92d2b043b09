"""The shipped operators by name; nothing is imported until a name is used."""

from __future__ import annotations

from buffer_engine.registry import Registry

OPERATORS = Registry(
    "operator",
    "operators",
    {
        "normalize_text": "operators.clean.normalize_text:NormalizeText",
        "replace_pattern": "operators.clean.replace_pattern:ReplacePattern",
        "strip_markup": "operators.clean.strip_markup:StripMarkup",
        "fix_mojibake": "operators.clean.fix_mojibake:FixMojibake",
        "redact_pii": "operators.clean.redact_pii:RedactPii",
        "trim_boilerplate": "operators.clean.trim_boilerplate:TrimBoilerplate",
        "extract_reasoning": "operators.clean.extract_reasoning:ExtractReasoning",
        "schema_check": "operators.format.schema_check:SchemaCheck",
        "messages_check": "operators.format.messages_check:MessagesCheck",
        "json_answer_check": "operators.format.json_answer_check:JsonAnswerCheck",
        "tool_call_check": "operators.format.tool_call_check:ToolCallCheck",
        "to_preference_pairs": "operators.format.to_preference_pairs:ToPreferencePairs",
        "token_mask_rebuild": "operators.format.token_mask_rebuild:TokenMaskRebuild",
        "length_filter": "operators.filter.length_filter:LengthFilter",
        "repetition_filter": "operators.filter.repetition_filter:RepetitionFilter",
        "text_quality_filter": "operators.filter.text_quality_filter:TextQualityFilter",
        "decontaminate": "operators.filter.decontaminate:Decontaminate",
        "reward_filter": "operators.filter.reward_filter:RewardFilter",
        "staleness_filter": "operators.filter.staleness_filter:StalenessFilter",
        "truncated_mask": "operators.filter.truncated_mask:TruncatedMask",
        "regex_or_exact_match": "operators.score.regex_or_exact_match:RegexOrExactMatch",
        "math_verify": "operators.score.math_verify:MathVerify",
        "reasoning_gym_answer": "operators.score.reasoning_gym_answer:ReasoningGymAnswer",
        "parsable": "operators.score.parsable:Parsable",
        "ended": "operators.score.ended:Ended",
        "pass_rate": "operators.score.pass_rate:PassRate",
        "reward_shape": "operators.reward.reward_shape:RewardShape",
        "overlong_penalty": "operators.reward.overlong_penalty:OverlongPenalty",
        "reward_normalize": "operators.reward.reward_normalize:RewardNormalize",
        "reward_inject": "operators.reward.reward_inject:RewardInject",
        "credit_assign": "operators.reward.credit_assign:CreditAssign",
        "exact_dedup": "operators.dedup.exact_dedup:ExactDedup",
        "group_reward_std": "operators.group.group_reward_std:GroupRewardStd",
        "dynamic_sampling": "operators.group.dynamic_sampling:DynamicSampling",
        "group_complete": "operators.group.group_complete:GroupComplete",
        "group_reward_range": "operators.group.group_reward_range:GroupRewardRange",
        "regroup_turns": "operators.group.regroup_turns:RegroupTurns",
        "window_turns": "operators.group.window_turns:WindowTurns",
        "balance_sample": "operators.select.balance_sample:BalanceSample",
        "curriculum": "operators.select.curriculum:Curriculum",
        "sql": "operators.select.sql:Sql",
    },
)
"""Every operator that a pipeline can name; plug-ins join through the entry point group `buffer_engine.operators`."""
