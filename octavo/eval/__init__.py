"""How good a model is as this engine runs it: perplexity, and how far it is from a baseline."""
