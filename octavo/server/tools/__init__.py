"""Calls of tools: what a request offers, how a model's format writes a call, how one is found in its text."""
