"""The experience store: tables, durable appends, SQL and the contracts that operators, explorers and trainers share."""
