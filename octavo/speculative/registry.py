"""From a method's name to what proposes."""

from __future__ import annotations

from octavo.speculative.ngram import NgramProposer
from octavo.speculative.outputs import Outputs
from octavo.speculative.proposer import HostProposer
from octavo.speculative.suffix import MAX_TOKENS, SuffixProposer
from octavo.speculative_config import SpeculativeConfig


def make_host_proposer(config: SpeculativeConfig) -> HostProposer | None:
    """The proposer of a method that drafts on the host; None: it drafts on the workers."""
    if config.method == "ngram":
        return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "suffix":
        return SuffixProposer(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
            Outputs(config.suffix_decoding_max_cached_requests, MAX_TOKENS),
        )
    return None
