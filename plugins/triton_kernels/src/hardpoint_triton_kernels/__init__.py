"""Triton kernels other than attention, for GPUs of any vendor.

Kernel overrides (kind ``kernel_override``), each named after its seam: ``triton_silu_and_mul``, ``triton_rms_norm``,
``triton_add_rms_norm``, ``triton_rotary_embedding``, ``triton_top_k_top_p``.

Operators (kind ``custom_op``, plugin ``triton_ops``, namespace ``hardpoint_triton_kernels``): ``gelu_and_mul``,
``rotate_neighbors``, ``quantize_int8``, ``quantize_fp8``, ``apply_penalties``, ``rejection_sample``, ``fused_moe``,
``copy_blocks``, ``zero_blocks``.

Importing this package imports neither Triton nor any kernel: plugins can be listed where Triton is not installed, and
say there that it is absent.
"""
