"""From a method's name to what proposes."""

from __future__ import annotations

from octavo.speculative.ngram import NgramProposer
from octavo.speculative.proposer import HostProposer
from octavo.speculative_config import SpeculativeConfig


def make_host_proposer(config: SpeculativeConfig) -> HostProposer:
    """The proposer of a method that drafts on the host."""
    assert config.method == "ngram", config.method
    return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
