"""A server of a decoder that speaks OpenAI's protocol: completions and chat completions, over HTTP.

`scheduler.py` lets many requests share a decoder, `requests.py` says what of a request is taken, `words.py`
has the tokenizer and the chat template, `routes.py` the answers; begin in `server.py`.
"""
