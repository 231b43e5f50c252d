"""Single products by the kernels: what a step does outside of a decoder's program."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from runtime.devices.cpu.kernels.library import Step
from runtime.devices.cpu.matrices import Matrix, Threads
from runtime.devices.cpu.program import Program, Then


class Products:
    """y = x Wᵀ + b for packed matrices. Each matrix has a program of its own, made when it is first used."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.programs: WeakKeyDictionary[Matrix, Program] = WeakKeyDictionary()

    def multiply(self, x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
        """x [N, in] -> [N, out] in the dtype of x."""
        program = self.programs.get(matrix)
        if program is None:
            program = self.programs[matrix] = self._program(matrix)
        rows = x.float().contiguous()
        out = torch.empty(len(rows), matrix.outputs)
        if len(rows):
            program.run(Step(num_tokens=len(rows), input=rows.data_ptr(), output=out.data_ptr()))
        return (out if bias is None else out.add_(bias)).to(x.dtype)

    def _program(self, matrix: Matrix) -> Program:
        program = Program(self.threads)
        floats, inputs = program.buffer(matrix.inputs), program.buffer_for(matrix)
        out = program.buffer(matrix.outputs)
        program.input(floats)
        program.prepare(floats, inputs)
        program.linear(inputs, matrix, None, out, Then.STORE, keeps=False)
        program.output(out)
        return program
