"""From a method's name to what proposes."""

from __future__ import annotations

from octavo.speculative.ngram import NgramProposer
from octavo.speculative.proposer import HostProposer
from octavo.speculative_config import SpeculativeConfig


def make_host_proposer(config: SpeculativeConfig) -> HostProposer | None:
    """The proposer of a method that drafts on the host; None: it drafts on the workers."""
    if config.method != "ngram":
        return None
    return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
