"""KV cache bookkeeping: formats, blocks, keys. Knows no tensors' contents."""
