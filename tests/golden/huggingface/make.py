"""Writes the folders next to this file: tiny random checkpoints, and what `transformers` computes with them.

  pip install '.[interop]' && python tests/golden/huggingface/make.py

For each family config.json and weights as `transformers` saves them, and expected.npz: `tokens` [2, T] int, and of each
layer's output, and the logits, float32 [2, T, ...] without a cache; `positions_from` is where a second pass over the same
tokens begins, at long positions, with `far_logits`.
"""

import pathlib

import numpy as np
import torch
import transformers

_FOLDER = pathlib.Path(__file__).parent
_LENGTH, _FAR = 20, 3000
_COMMON = dict(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
_LLAMA3 = dict(
    rope_type='llama3', rope_theta=10_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=128,
)
CONFIGS = {
    'llama': transformers.LlamaConfig(
        **_COMMON, rope_parameters={'rope_type': 'default', 'rope_theta': 500.0}, rms_norm_eps=1e-5,
        tie_word_embeddings=False),
    'llama3': transformers.LlamaConfig(**_COMMON, rope_parameters=_LLAMA3, tie_word_embeddings=True),
    'qwen2': transformers.Qwen2Config(**_COMMON, rope_parameters={'rope_type': 'default', 'rope_theta': 1e6}),
    'qwen3': transformers.Qwen3Config(
        **_COMMON, head_dim=12, rope_parameters={'rope_type': 'default', 'rope_theta': 1e6}, tie_word_embeddings=False),
    'gemma3': transformers.Gemma3TextConfig(
        **_COMMON, head_dim=12, sliding_window=5, query_pre_attn_scalar=20, layer_types=[
            'sliding_attention', 'full_attention', 'sliding_attention', 'full_attention'],
        rope_parameters={
            'full_attention': {'rope_type': 'linear', 'factor': 4.0, 'rope_theta': 1e5},
            'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e3}}),
}


def build(name: str, seed: int) -> transformers.PreTrainedModel:
  """A model whose every parameter is random, norm scales and biases too, so that a misplaced one shows."""
  config = CONFIGS[name]
  config._attn_implementation = 'eager'
  model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    for parameter in model.parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      parameter.add_(0.3 * noise) if parameter.ndim == 1 else parameter.copy_(noise / parameter.shape[-1] ** 0.5)
  return model


def expected(model: transformers.PreTrainedModel, seed: int) -> dict[str, np.ndarray]:
  """What expected.npz holds."""
  tokens = torch.randint(model.config.vocab_size, (2, _LENGTH), generator=torch.Generator().manual_seed(seed))
  outputs = {}

  def keep(i):
    return lambda module, args, output: outputs.__setitem__(i, output[0] if isinstance(output, tuple) else output)

  # Hooks, not `hidden_states`: the last of those has gone through the final norm.
  hooks = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(model.model.layers)]
  with torch.no_grad():
    logits = model(tokens, use_cache=False).logits
    layers = torch.stack([outputs[i] for i in range(len(hooks))])
    far = torch.arange(_FAR, _FAR + _LENGTH)[None].expand(2, -1)
    far_logits = model(tokens, position_ids=far, use_cache=False).logits
  for hook in hooks:
    hook.remove()
  return {
      'tokens': tokens.numpy(), 'layers': layers.numpy(), 'logits': logits.numpy(), 'positions_from': np.array(_FAR),
      'far_logits': far_logits.numpy(),
  }


def main() -> None:
  for name in CONFIGS:
    folder, model = _FOLDER / name, build(name, seed=0)
    # Small shards, so that an index is written; the others have one file.
    model.save_pretrained(folder, max_shard_size='40KB' if name == 'qwen3' else '1GB')
    np.savez_compressed(folder / 'expected.npz', **expected(model, seed=1))


if __name__ == '__main__':
  main()
