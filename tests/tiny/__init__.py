"""Tiny random models as folders and GGUF files, made by Transformers and the `gguf` package alone.

Nothing of Octavo is used here, so that what it reads and computes is compared with something else.
`checkpoint("qwen3")` is a folder as `save_pretrained` writes it (float32 safetensors, tokenizer with
a chat template, generation_config.json), made once per process and removed when it ends.

The weights are scaled so that the logits' standard deviation is at least 1, and each variant's seed
is one whose greedy continuation of every prompt of `PROMPTS` has at least 20 distinct tokens of 64 and
leads at every step by more than 1e-3: equality of tokens is then a test of the computation, not of
rounding or of a loop. `python -m tests.tiny VARIANT...` searches for such seeds.
"""

from tests.tiny.gguf_writer import gguf_file as gguf_file
from tests.tiny.models import MIN_DISTINCT as MIN_DISTINCT
from tests.tiny.models import MIN_GAP as MIN_GAP
from tests.tiny.models import NEW_TOKENS as NEW_TOKENS
from tests.tiny.models import build as build
from tests.tiny.models import checkpoint as checkpoint
from tests.tiny.models import greedy as greedy
from tests.tiny.models import is_good as is_good
from tests.tiny.models import logits as logits
from tests.tiny.models import reference as reference
from tests.tiny.models import root as root
from tests.tiny.tokenizer import CHAT_TEMPLATE as CHAT_TEMPLATE
from tests.tiny.tokenizer import save_tokenizer as save_tokenizer
from tests.tiny.tokenizer import tokenizer_json as tokenizer_json
from tests.tiny.variants import BOS as BOS
from tests.tiny.variants import CONTEXT as CONTEXT
from tests.tiny.variants import EOS as EOS
from tests.tiny.variants import PROMPTS as PROMPTS
from tests.tiny.variants import SPECIAL_TOKENS as SPECIAL_TOKENS
from tests.tiny.variants import VARIANTS as VARIANTS
from tests.tiny.variants import VOCAB_SIZE as VOCAB_SIZE
