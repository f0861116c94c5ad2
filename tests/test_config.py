"""The configuration: every refusal with its message, overrides, differences, the experiments."""

import copy
import json
import pathlib

import pytest

from dspec import config as config_lib
from dspec.checkpoints import huggingface
from dspec.errors import UserError

EXPERIMENTS = pathlib.Path(__file__).parents[1] / 'experiments'
NAMES = ('uniform', 'positional_weighting', 'first_error_focal', 'chain_loss', 'ablation', 'decoding')


def _with(**changes):
  """default() with `section__key=value` or `key=value` set."""
  return config_lib.apply_overrides(
      config_lib.default(), {key.replace('__', '.'): value for key, value in changes.items()})


def _problems(config):
  with pytest.raises(UserError) as error:
    config_lib.validate(config)
  return str(error.value).split('\n')


@pytest.mark.parametrize('budget', config_lib.BUDGETS)
@pytest.mark.parametrize('name', NAMES)
def test_experiments_load_and_validate(name, budget):
  config = config_lib.load(f'{EXPERIMENTS / name}.py' + (f':{budget}' if budget else ''))
  config_lib.validate(config)
  assert config.experiment == name
  assert config.is_locked and config.train.is_locked
  # An experiment changes its loss, its arms, and what is measured of them; all else is the budget's.
  changed = config_lib.differences(config, config_lib.default(budget))
  changed = {key for key in changed if key not in ('evaluate.num_prompts', 'evaluate.batch_size')}
  assert {key.split('.')[0] for key in changed} <= {'experiment', 'loss', 'arms', 'mechanisms'}


TARGETS = sorted(path.stem for path in (EXPERIMENTS / 'targets').glob('*.py'))
# Layers, vocabulary, context, and what the tokenizer can make, of the models as they are published.
PUBLISHED = {
    'llama3_8b': (32, 128256, 8192, 128000), 'llama3_2_3b': (28, 128256, 131072, 128000),
    'qwen3_4b': (36, 151936, 40960, 151669), 'qwen3_8b': (36, 151936, 40960, 151669),
    'smollm2_135m': (30, 49152, 8192, None), 'gemma3_270m': (18, 262144, 32768, None)}


@pytest.mark.parametrize('budget', config_lib.BUDGETS)
@pytest.mark.parametrize('name', TARGETS)
def test_experiments_on_published_targets_fit_them(name, budget):
  config = config_lib.load(f'{EXPERIMENTS}/targets/{name}.py' + (f':{budget}' if budget else ''))
  config_lib.validate(config)
  assert config.experiment == name and config.target.path.startswith('hub:')
  layers, vocab_size, length, texts = PUBLISHED[name]
  tokenizer = _Tokenizer()
  tokenizer.used_ids = set(range(texts)) if texts else {1, 2, *range(300, vocab_size)}
  target = _target(name)
  assert (target.num_layers, target.vocab_size, target.max_length) == (layers, vocab_size, length)
  config_lib.validate_against_target(config, target, tokenizer)
  if texts and budget != 'smoke':
    # arXiv 2606.11552, section 4: what its drafters are and how they are trained.
    assert (config.drafter.num_layers, config.drafter.block_size, config.drafter.window) == (4, 16, 0)
    assert (config.train.batch_size, config.train.anchors, config.train.learning_rate) == (32, 512, 1e-3)
    assert config.data.row_tokens == 4096
    assert 3000 < config.data.max_prompt_tokens + config.data.max_response_tokens <= 4096
    assert config.train.steps * 32 == pytest.approx(3 * (config.data.num_prompts - config.data.held_out), rel=1e-3)


def test_experiments_are_the_papers_arms():
  losses = {name: config_lib.load(f'{EXPERIMENTS / name}.py').loss for name in NAMES}
  terms = {name: (loss.gamma, loss.first_error, loss.chain) for name, loss in losses.items()}
  assert terms['uniform'] == (None, 0, 0)
  assert terms['positional_weighting'] == (10, 0, 0)
  assert terms['first_error_focal'] == (10, 0.3, 0)
  assert terms['chain_loss'] == (10, 0.3, 40)


def test_ablation_arms_equal_the_single_experiments():
  ablation = config_lib.load(f'{EXPERIMENTS}/ablation.py')
  assert [name for name, _ in ablation.arms] == ['uniform', 'weighting', 'first_error', 'chain']
  for (_, overrides), single in zip(ablation.arms, NAMES, strict=False):
    arm = config_lib.apply_overrides(ablation, overrides)
    assert arm.loss.to_dict() == config_lib.load(f'{EXPERIMENTS / single}.py').loss.to_dict()


TABLES = sorted((EXPERIMENTS / 'paper').glob('table?.py'))


@pytest.mark.parametrize('path', TABLES, ids=lambda path: path.stem)
def test_tables_of_the_paper(path, tmp_path):
  assert len(TABLES) == 8
  drafter = tmp_path / 'config.json'
  drafter.write_text('{}')
  for budget in ('', 'embedded', 'smoke'):
    config = config_lib.load(f'{path}:{budget}' if budget else str(path)).unlock()
    if path.stem == 'table8':
      assert config.drafter.init == 'runs/streak_distilled'
      config.drafter.init = str(tmp_path)
    config_lib.validate(config)
    assert len(config.arms) >= 2 and dict(config.arms)['chain'] == {}
    assert (config.loss.gamma, config.loss.first_error, config.loss.chain) == (10, 0.3, 40)
    if budget == 'embedded':
      assert config.evaluate.num_prompts >= 32 and config.evaluate.max_new_tokens == 128 and not config.target.path
    if not budget:
      assert config.target.path.startswith('hub:') and config.train.anchors == 512
    if budget != 'smoke' and path.stem != 'table6':
      assert config.evaluate.sets == ('held_out', *config_lib.BENCHMARKS)


def test_variants_of_tables():
  load = lambda name: config_lib.load(f'{EXPERIMENTS}/paper/{name}')
  for target in ('llama3_2_3b', 'qwen3_4b', 'qwen3_8b'):
    assert load(f'table3.py:{target}').target.path == config_lib.TARGETS[target].path
  for budget, responses in (
      ('', 'regenerated'), (':regenerated', 'regenerated'), (':as_written', 'as_written'),
      (':embedded_as_written', 'as_written'), (':embedded_regenerated', 'regenerated')):
    assert load(f'table5.py{budget}').data.responses == responses
  assert len(load('table2.py').arms) == len(load('table2.py:embedded_sweep').arms) == 15  # All its rows.
  alone = [name for name, _ in load('table4.py:embedded').arms if name not in config_lib.TERMS]
  assert alone == [name for name, _ in load('table4.py:embedded_alone').arms] and len(alone) == 2
  distil = load('table8.py:embedded_distil')
  assert (distil.loss.gamma, distil.loss.first_error, distil.loss.chain) == (None, 0, 40)
  assert distil.drafter.window == distil.drafter.vocab_size == 0 and not distil.drafter.init
  with pytest.raises(UserError, match="unknown budget 'embeded'.*did you mean embedded"):
    load('table2.py:embeded')


def test_budgets_grow():
  smoke, main, long = (config_lib.default(budget) for budget in ('smoke', '', 'long'))
  for key in ('data.num_prompts', 'train.steps', 'evaluate.num_prompts'):
    sizes = [config_lib.flatten(config)[key] for config in (smoke, main, long)]
    assert sizes == sorted(set(sizes))


def test_unknown_budget_names_the_nearest():
  with pytest.raises(UserError, match="unknown budget 'smok'.*did you mean smoke"):
    config_lib.default('smok')


@pytest.mark.parametrize('key, value, text', [
    ('seed', -1, 'at least 0'),
    ('experiment', '', 'names a folder'),
    ('experiment', 'a/b', 'names a folder'),
    ('experiment', '..', 'names a folder'),
    ('target.package', '', 'target.path'),
    ('target.path', '/nowhere/model.gguf', 'no such file'),
    ('data.prompts', '/nowhere/prompts.jsonl', 'no such file'),
    ('data.prompts', 'tfds:gsm8k:train', 'tfds:NAME:split:field'),
    ('data.num_prompts', 0, 'at least 1'),
    ('data.held_out', 700, 'below data.num_prompts=700'),
    ('data.held_out', 0, 'at least 1'),
    ('data.held_out', -1, 'at least 0'),
    ('data.max_prompt_tokens', 0, 'at least 1'),
    ('data.max_response_tokens', -3, 'at least 1'),
    ('data.generation_batch_size', 0, 'at least 1'),
    ('data.prompt_temperature', 0.0, 'above 0'),
    ('data.response_temperature', -0.1, 'at least 0'),
    ('data.features', 'cache', 'did you mean cached?'),
    ('drafter.num_layers', 0, 'at least 1'),
    ('drafter.block_size', 1, 'at least 2'),
    ('data.row_tokens', -1, 'at least 0'),
    ('data.row_tokens', 15, 'must hold a block of drafter.block_size=16 tokens'),
    ('train.attention', 'flash', 'did you mean splash?'),
    ('drafter.target_layers', (), 'layer numbers'),
    ('drafter.target_layers', (3, 1), 'ascending'),
    ('drafter.target_layers', (3, 3), 'each once'),
    ('drafter.target_layers', (-1, 3), 'from 0'),
    ('drafter.target_layers', ('a', 3), 'layer numbers'),
    ('drafter.mask_token_id', -1, 'at least 0'),
    ('loss.gamma', 0.0, 'above 0'),
    ('loss.gamma', -7.0, 'above 0'),
    ('loss.gamma', float('nan'), 'above 0'),
    ('loss.first_error', -0.3, 'at least 0'),
    ('loss.chain', -40.0, 'at least 0'),
    ('loss.chain', float('inf'), 'finite'),
    ('loss.reduction', 'meen', 'did you mean mean?'),
    ('train.steps', 0, 'at least 1'),
    ('train.steps', -1, 'at least 0'),
    ('drafter.init', '/nowhere', 'no drafter there'),
    ('train.batch_size', 0, 'at least 1'),
    ('train.anchors', 0, 'at least 1'),
    ('train.learning_rate', 0.0, 'above 0'),
    ('train.learning_rate', float('nan'), 'finite'),
    ('train.warmup_fraction', 1.0, 'below 1'),
    ('train.weight_decay', -0.01, 'at least 0'),
    ('train.clip_norm', 0.0, 'above 0'),
    ('train.head_chunk', 0, 'at least 1'),
    ('train.compute_dtype', 'bfloat', 'did you mean bfloat16?'),
    ('train.checkpoint_every', 0, 'at least 1'),
    ('train.log_every', 0, 'at least 1'),
    ('train.accumulate', 0, 'at least 1'),
    ('train.accumulate', 5, 'must divide train.batch_size=64'),
    ('train.ema', 1.0, 'at least 0 and below 1'),
    ('train.ema', float('nan'), 'at least 0 and below 1'),
    ('train.keep', 0, 'at least 1'),
    ('train.evaluate_every', -1, 'at least 0'),
    ('train.evaluate_prompts', 0, 'at least 1'),
    ('train.profile_steps', (3, 3), 'the first step and the one after the last, as (10, 13), of steps 1 to 800'),
    ('train.profile_steps', (5, 3), 'the first step'),
    ('train.profile_steps', (0, 3), 'the first step'),
    ('train.profile_steps', (3, 802), 'the first step'),
    ('train.profile_steps', (3,), 'the first step'),
    ('train.profile_steps', (3, 4.5), 'the first step'),
    ('evaluate.checkpoint', 'bet', 'did you mean best?'),
    ('evaluate.checkpoint', 'best', 'train.evaluate_every=0 measures none'),
    ('evaluate.sets', ('heldout',), "unknown set 'heldout'; did you mean held_out?"),
    ('evaluate.sets', ('humaneval', 'humaneval'), 'twice'),
    ('evaluate.prompt_seed', -1, 'must be at least 0'),
    ('evaluate.samples', 2, 'at evaluate.temperature=0 every sample is the same'),
    ('data.prompts_dir', '/no/such/folder', 'no such folder'),
    ('evaluate.num_prompts', 0, 'at least 1'),
    ('evaluate.max_new_tokens', 0, 'at least 1'),
    ('evaluate.batch_size', 0, 'at least 1'),
    ('evaluate.block_size', 1, 'at least 2'),
    ('evaluate.latency_block_size', 1, 'at least 2'),
    ('evaluate.latency_prompts', -1, 'at least 0'),
    ('evaluate.latency_trees', (4, 0), 'whole numbers of at least 1'),
    ('drafter.window', -1, 'at least 0'),
    ('drafter.vocab_size', -1, 'at least 0'),
    ('generate.temperature', -1.0, 'at least 0'),
    ('generate.top_p', 0.0, 'above 0 and at most 1'),
    ('generate.block_size', 1, 'at least 2'),
    ('generate.num_drafts', 0, 'at least 1'),
    ('generate.tree_size', -1, 'at least 0'),
    ('evaluate.bootstrap_samples', 0, 'at least 1'),
    ('train.steps', None, 'a whole number'),
    ('target.path', None, 'a text'),
])
def test_each_bad_value_is_named_alone(key, value, text):
  problems = _problems(config_lib.apply_overrides(config_lib.default(), {key: value}))
  assert len(problems) == 1, problems
  assert problems[0].startswith(f'--config.{key}={value}: ')
  assert text in problems[0]


def test_every_leaf_is_checked_for_its_type():
  for key in config_lib.flatten(config_lib.default()):
    if key in ('loss.gamma', 'evaluate.prompt_seed'):  # None is a value of theirs.
      continue
    config = config_lib.apply_overrides(config_lib.default(), {key: None})
    assert _problems(config)[0].startswith(f'--config.{key}=None: must be a')


@pytest.mark.parametrize('changes', [
    {'loss__gamma': float('inf')},
    {'loss__gamma': None},
    {'evaluate__block_size': 8},
    {'data__row_tokens': 16},
    {'evaluate__sets': ()},
    {'evaluate__sets': ('humaneval',), 'data__held_out': 0},
    {'data__response_temperature': 0},
    {'data__prompts': 'tfds:gsm8k:train:question'},
    {'data__prompts': __file__},
    {'target__path': __file__, 'target__package': ''},
    {'train__profile_steps': (800, 801)},
    {'train__evaluate_every': 5, 'evaluate__checkpoint': 'best', 'train__accumulate': 64, 'train__ema': 0.999},
    # 40 are held out, and 24 of them reported.
    {'train__evaluate_every': 5, 'train__evaluate_prompts': 16},
    {'train__evaluate_every': 5, 'train__evaluate_prompts': 40, 'evaluate__sets': ('humaneval',)},
])
def test_edges_that_are_fine(changes):
  config_lib.validate(_with(**changes))


@pytest.mark.parametrize('sets, reported, count', [(('held_out',), 24, 17), (('humaneval',), 0, 41)])
def test_no_prompt_is_chosen_by_and_reported(sets, reported, count):
  problems = _problems(
      _with(train__evaluate_every=5, train__evaluate_prompts=count, evaluate__sets=sets))
  assert problems == [
      f'--config.train.evaluate_prompts={count}: with the {reported} held-out prompts of evaluate.num_prompts, more '
      'than the data.held_out=40 that there are, and no prompt may be both; lower one of them or raise that']


def test_all_problems_come_at_once():
  problems = _problems(_with(train__steps=0, loss__chain=-1.0, drafter__block_size=0))
  assert sorted(problem.split('=')[0] for problem in problems) == [
      '--config.drafter.block_size', '--config.loss.chain', '--config.train.steps']


def test_keys_missing_or_added_in_an_unlocked_file():
  config = copy.deepcopy(config_lib.default()).unlock()
  del config.train['steps']
  config.train.step = 3
  assert _problems(config) == [
      '--config.train.steps: missing; start from dspec.config.default()',
      '--config.train.step: unknown option; did you mean --config.train.steps?']


@pytest.mark.parametrize('arms, text', [
    (('uniform',), 'must be a pair'),
    ((('a', {}), ('a', {})), 'names must differ'),
    ((('a b', {}),), 'letters, digits'),
    ((('a', {'loss.gama': 1.0}),), "unknown option 'loss.gama'; did you mean loss.gamma?"),
    ((('a', {'loss.gamma': 'ten'}),), "loss.gamma='ten': must be a number"),
    ((('a', {'loss.gamma': -1.0}),), "--config.arms, 'a': --config.loss.gamma=-1.0: must be above"),
    ((('a', {'drafter.block_size': 65}),), "'a': --config.data.row_tokens=64: must hold a block of drafter.block_size=65"),
    ((('a', {'seed': 1}),), 'changes seed; arms share'),
    ((('a', {'data.num_prompts': 800}),), 'changes data.num_prompts; arms share'),
    ((('a', {'drafter.target_layers': (1,)}),), 'changes drafter.target_layers; arms share'),
])
def test_bad_arms(arms, text):
  problems = _problems(_with(arms=arms, data__row_tokens=64))
  assert len(problems) == 1, problems
  assert text in problems[0]


def test_a_fault_of_the_experiment_is_not_repeated_for_each_arm():
  config = _with(arms=(('a', {}), ('b', {'loss.gamma': 7.0})), train__steps=0)
  assert _problems(config) == ['--config.train.steps=0: must be at least 1, or drafter.init be given']


# ---- Against the target --------------------------------------------------------------------------


def _target(name):
  """The shape of a published target."""
  return huggingface.config_from_fields(name, config_lib.TARGETS[name].shape)


class _Tokenizer:
  turn_end_ids = (2, 198)
  used_ids = {1, 2, 198, *range(1000, 49000)}

  def user_prefix_ids(self):
    return [1, 9690, 198]


@pytest.mark.parametrize('key, value, text', [
    ('drafter.target_layers', (1, 28, 30), 'out of range; the target has layers 0 to 29'),
    ('drafter.target_layers', (1, 29), 'the last layer cannot be tapped; use layers 0 to 28'),
    ('drafter.vocab_size', 49153, 'the target has 49152 tokens'),
    ('drafter.mask_token_id', 49152, 'its rows are 0 to 49151'),
    ('drafter.mask_token_id', 2, 'template can make this token'),
    ('drafter.mask_token_id', 9690, 'texts or the chat'),
    ('data.max_response_tokens', 8192 - 5 - 60 - 16 + 1, '8193 tokens; the target holds 8192'),
    ('evaluate.max_new_tokens', 8192 - 5 - 60 - 16 + 1, '8193 tokens; the target holds 8192'),
])
def test_against_the_target(key, value, text):
  config = config_lib.apply_overrides(config_lib.default(), {key: value})
  config_lib.validate(config)
  with pytest.raises(UserError) as error:
    config_lib.validate_against_target(config, _target('smollm2_135m'), _Tokenizer())
  assert str(error.value).startswith(f'--config.{key}={value}: ')
  assert text in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('key, value', [
    ('drafter.target_layers', (0, 28)),
    ('drafter.mask_token_id', 49151),
    ('data.max_response_tokens', 8192 - 5 - 64 - 16),
])
def test_against_the_target_at_the_edge(key, value):
  config = config_lib.apply_overrides(config_lib.default(), {key: value})
  assert config_lib.validate_against_target(config, _target('smollm2_135m'), _Tokenizer()) is None


# ---- Tools ---------------------------------------------------------------------------------------


def test_apply_overrides_copies():
  config = config_lib.default()
  before = config_lib.to_json(config)
  changed = config_lib.apply_overrides(config, {'loss.gamma': 10, 'train.steps': 7, 'seed': 3})
  assert (changed.loss.gamma, changed.train.steps, changed.seed) == (10.0, 7, 3)
  assert type(changed.loss.gamma) is float
  assert config_lib.to_json(config) == before
  assert changed.is_locked and changed.loss.is_locked
  # None takes the decay away again, and the place keeps its type.
  back = config_lib.apply_overrides(changed, {'loss.gamma': None})
  assert back.loss.gamma is None
  assert config_lib.apply_overrides(back, {'loss.gamma': 5.0}).loss.gamma == 5.0


@pytest.mark.parametrize('overrides, text', [
    ({'train.step': 1}, "unknown option 'train.step'; did you mean train.steps?"),
    ({'train': 1}, "unknown option 'train'"),
    ({'train.steps': 'many'}, "train.steps='many': must be a whole number"),
    ({'train.steps': 1.5}, 'train.steps=1.5: must be a whole number'),
    ({'drafter.target_layers': 3}, 'drafter.target_layers=3: must be a tuple'),
])
def test_apply_overrides_refuses(overrides, text):
  with pytest.raises(UserError) as error:
    config_lib.apply_overrides(config_lib.default(), overrides)
  assert text in str(error.value)


def test_differences():
  a = config_lib.default()
  assert config_lib.differences(a, config_lib.default()) == []
  b = _with(loss__gamma=10.0, drafter__target_layers=(1, 8), arms=(('x', {'loss.chain': 1.0}),))
  assert config_lib.differences(a, b) == ['arms', 'drafter.target_layers', 'loss.gamma']
  # Against what was read back from a file, and with keys that one side lacks.
  saved = json.loads(config_lib.to_json(b))
  assert config_lib.differences(b, saved) == []
  del saved['train']['steps']
  saved['train']['new'] = 1
  assert config_lib.differences(b, saved) == ['train.new', 'train.steps']


def test_to_dict_is_what_json_has():
  config = _with(arms=(('x', {'loss.chain': 1.0}),))
  plain = config_lib.to_dict(config)
  assert plain == json.loads(config.to_json())
  assert plain['drafter']['target_layers'] == [1, 8, 14, 20, 27]
  assert plain['loss']['gamma'] is None


def test_cache_dir(monkeypatch, tmp_path):
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.delenv('DSPEC_CACHE_DIR', raising=False)
  assert config_lib.cache_dir(config_lib.default()) == tmp_path / '.cache/dspec'
  monkeypatch.setenv('DSPEC_CACHE_DIR', '~/elsewhere')
  assert config_lib.cache_dir(config_lib.default()) == tmp_path / 'elsewhere'
  assert config_lib.cache_dir(_with(cache_dir='/mine')) == pathlib.Path('/mine')


# ---- Files and command lines ---------------------------------------------------------------------


@pytest.mark.parametrize('text, suffix, message', [
    ('x = 1\n', '', "has no function get_config(budget='')"),
    ('get_config = 3\n', '', "has no function get_config(budget='')"),
    ('def get_config(): (\n', '', 'line 1: '),
    ('def get_config():\n  return {}\n', '', 'must return a ConfigDict'),
    ('def get_config():\n  return 1\n', ':smoke', 'too many positional arguments'),
    ('def get_config(a, b):\n  return 1\n', '', 'missing a required argument'),
    ('from dspec import config\n\ndef get_config(budget=""):\n  return config.default(budget)\n',
     ':smok', 'did you mean smoke?'),
    ('from dspec import config\n\ndef get_config():\n  c = config.default()\n  c.train.stepz = 1\n',
     '', 'line 5: Key "stepz" does not exist and cannot be added since the config is locked. '
         'Did you mean "steps" instead of "stepz"?'),
    ('from dspec import config\n\ndef get_config():\n  c = config.default()\n  c.seed = "x"\n',
     '', "line 5: Could not override field 'seed'"),
])
def test_bad_config_files(tmp_path, text, suffix, message):
  path = tmp_path / 'mine.py'
  path.write_text(text)
  with pytest.raises(UserError) as error:
    config_lib.load(f'{path}{suffix}')
  assert str(path) in str(error.value)
  assert message in str(error.value)
  assert '\n' not in str(error.value)


def test_absent_config_file_names_the_nearest():
  with pytest.raises(UserError) as error:
    config_lib.load(f'{EXPERIMENTS}/unifrom.py')
  assert str(error.value) == (f'--config={EXPERIMENTS}/unifrom.py: no such file; '
                              f'did you mean {EXPERIMENTS}/uniform.py?')


@pytest.mark.parametrize('words, text', [
    ([], '--config is missing'),
    (['--workdir=x'], '--config is missing'),
    (['--config=F', '--config.train.step=1'], 'did you mean --config.train.steps?'),
    (['--config', 'F', '--config.loss.gama', '1'], 'did you mean --config.loss.gamma?'),
    (['--config=F', '--noconfig.steps'], 'did you mean --config.train.steps?'),
    (['--config=F', '--config.train=1'], 'set one of its options, as --config.train.'),
    (['--config=F', '--config.zzz=1'], 'there are: --config.'),
])
def test_bad_command_lines(words, text):
  words = [word.replace('F', f'{EXPERIMENTS}/uniform.py') for word in words]
  with pytest.raises(UserError) as error:
    config_lib.check_command_line(words)
  assert text in str(error.value)


def test_good_command_line():
  assert config_lib.check_command_line(
      [f'--config={EXPERIMENTS}/uniform.py:smoke', '--config.loss.gamma=3', '--workdir=x']) is None
