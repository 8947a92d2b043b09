"""Checks between sections of a specification that need no operators, in the order in which they run.

Nothing here imports torch, loads a model or opens a store. Each check looks at whatever part of the specification is
valid, so one wrong section does not hide what is wrong elsewhere. What they look at is told by their modules: names,
sources on disk, the algorithm, sizes, optional packages.
"""

from __future__ import annotations

from pipelines.algorithm_checks import check_stages
from pipelines.findings import Findings
from pipelines.name_checks import check_names, check_partitions
from pipelines.package_checks import check_packages
from pipelines.size_checks import check_sizes
from pipelines.source_checks import check_models, check_shared_sources
from pipelines.spec import Spec
from pipelines.store_checks import check_addresses, check_store


def check_sections(spec: Spec, found: Findings) -> None:
    """Every check that needs no operators."""
    check_names(spec, found)
    check_partitions(spec, found)
    check_shared_sources(spec, found)
    check_store(spec, found)
    check_addresses(spec, found)
    check_models(spec, found)
    check_stages(spec, found)
    check_sizes(spec, found)
    check_packages(spec, found)
