"""Outputs of a given form: grammars that say, after each token, which tokens may come next."""
