"""The C++ kernels' functions: what each takes and returns."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

# One letter an argument: a pointer, an int64, an int32 or a float.
_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int32, "f": ctypes.c_float}

SIGNATURES = {
    "octavo_set_omp_parallel": "p",
    "octavo_vector_width": "",
    # norm_act.cpp
    "octavo_rms_norm": "pppnnnnfiii",
    "octavo_add_rms_norm": "ppppnnnfiii",
    "octavo_layer_norm": "pppppnnnfiii",
    "octavo_gated_activation": "ppnnniii",
    "octavo_softcap": "pnnnfii",
    # cache.cpp, attention.cpp, latent.cpp
    "octavo_rope_and_write_kv": "ppppnnnppippppni",
    "octavo_paged_attention": "pppnpppn",
    "octavo_latent_attention": "ppppp",
    "octavo_latent_write": "ppnnpnnpnpfppppni",
    # sampling.cpp, batch.cpp
    "octavo_argmax": "ppnnnii",
    "octavo_gumbel_argmax": "ppppipnnnii",
    "octavo_gather_rows": "ppnppnpppp",
    "octavo_map_blocks": "pppnpnnnpnp",
    "octavo_append_tokens": "pppnnpn",
    # moe.cpp
    "octavo_grouped_linear": "pnppppnppnniin",
    # half_pack.cpp, half_linear.cpp
    "octavo_half_panel": "",
    "octavo_half_pack": "ppnnn",
    "octavo_half_rows": "ppnpn",
    "octavo_half_linear": "ppnnppniin",
    # quant_pack.cpp, quant_linear.cpp
    "octavo_quant_lanes": "",
    "octavo_quant_bytes": "pn",
    "octavo_quant_pack": "pnppppn",
    "octavo_quant_rows": "ppnpin",
    "octavo_quant_linear": "ppnnppniin",
    # record.cpp
    "octavo_recording_begin": "",
    "octavo_recording_size": "p",
    "octavo_recording_end": "p",
    "octavo_recording_free": "p",
    "octavo_recording_replay": "pnnn",
}
"""The arguments of each function."""

RESULTS = {
    "octavo_set_omp_parallel": "",
    "octavo_half_pack": "",
    "octavo_quant_bytes": "n",
    "octavo_recording_begin": "p",
    "octavo_recording_size": "n",
    "octavo_recording_free": "",
}
"""What those return that do not return an int32; "": nothing."""


def declare(library: ctypes.CDLL, names: Iterable[str] = SIGNATURES) -> None:
    """Tell ctypes of the library's functions."""
    for name in names:
        function, result = getattr(library, name), RESULTS.get(name, "i")
        function.argtypes = [_TYPES[letter] for letter in SIGNATURES[name]]
        function.restype = _TYPES[result] if result else None
