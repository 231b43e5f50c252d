"""Kernels of the cpu device in C++: `python -m runtime.devices.cpu.kernels.build` compiles them, `library.py`
loads them. Start reading at library.cpp."""
