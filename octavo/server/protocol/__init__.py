"""Bodies of requests and answers, OpenAI's fields and vLLM's extra ones.

The structs parse requests, encode answers and are the source of the OpenAPI document.
"""
