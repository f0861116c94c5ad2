"""The scripts of launch/: their commands, their refusals, and their loops against played Google Cloud and Slurm."""

import json
import os
import pathlib
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / 'launch'
FLAGS = ['--config=experiments/targets/llama3_8b.py', '--workdir=/mnt/dspec/runs/chain']
SENT = [*FLAGS, '--config.cache_dir=/mnt/dspec/cache']
QUEUED = ['--name=chain', '--zone=us-east5-b', '--type=v6e-16', '--bucket=our-runs']
GKE = ['--name=chain', '--cluster=tpus', '--zone=us-east5-b', '--type=v6e-16', '--storage=dspec',
       '--image=host.dev/project/dspec:1']

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith('linux') or not shutil.which('bash'), reason='the scripts need bash and Linux tools')


def environment(**changes):
  """That of the tests without what Slurm or the reader's shell may have set."""
  kept = {name: value for name, value in os.environ.items() if not name.startswith('SLURM_') and name != 'HF_TOKEN'}
  return kept | {name: str(value) for name, value in changes.items()}


def launch(script, *words, cwd=ROOT, **variables):
  """Runs a script to its end: (status, stdout, stderr)."""
  done = subprocess.run(
      ['bash', str(LAUNCH / script), *words], cwd=cwd, env=environment(**variables), stdin=subprocess.DEVNULL,
      capture_output=True, text=True, timeout=120, check=False)
  return done.returncode, done.stdout, done.stderr


def dry(script, *words, **variables):
  """The commands of a dry run, as lists of words."""
  status, out, err = launch(script, '--dry_run', *words, **variables)
  assert status == 0, err
  return [shlex.split(line) for line in out.splitlines()]


def fake(folder, name, text):
  """An executable of that name, first on the PATH."""
  folder.mkdir(exist_ok=True)
  (folder / name).write_text(text)
  (folder / name).chmod(0o755)
  return f'{folder}:{os.environ["PATH"]}'


# ---- Commands --------------------------------------------------------------------------------------


@pytest.mark.parametrize('slice_type, runtime, capacity', [
    ('v4-32', 'tpu-ubuntu2204-base', []),
    ('v5litepod-16', 'v2-alpha-tpuv5-lite', ['--spot']),
    ('v5p-8', 'v2-alpha-tpuv5', ['--reserved']),
    ('v6e-256', 'v2-alpha-tpuv6e', ['--spot']),
])
def test_queued_resources_of_every_generation(slice_type, runtime, capacity):
  words = ['--name=chain', '--zone=us-east5-b', f'--type={slice_type}', '--bucket=our-runs', '--project=lab', *capacity]
  tpus, where = ['gcloud', 'compute', 'tpus'], ['--zone=us-east5-b', '--project=lab', '--quiet']
  files = 'runs/launch/chain/dspec.tar.gz', 'runs/launch/chain/dspec.env'
  assert dry('tpu_queued_resources.sh', *words, '--', *FLAGS) == [
      ['gcloud', 'storage', 'buckets', 'describe', 'gs://our-runs', '--raw',
       '--format=value(hierarchicalNamespace.enabled)'],
      ['mkdir', '-p', 'runs/launch/chain'],
      ['tar', '-czf', files[0], '-C', str(ROOT), 'setup.py', 'requirements.txt', 'dspec', 'experiments', 'launch'],
      [*tpus, 'queued-resources', 'create', 'chain', *where, '--node-id=chain', f'--accelerator-type={slice_type}',
       f'--runtime-version={runtime}', *capacity],
      [*tpus, 'queued-resources', 'list', *where, '--filter=name~/chain$', '--format=value(state.state)'],
      [*tpus, 'tpu-vm', 'scp', *files, 'chain:', *where, '--worker=all'],
      [*tpus, 'tpu-vm', 'ssh', 'chain', *where, '--worker=all',
       '--command=bash dspec/launch/tpu_vm_run.sh --alive 2>/dev/null || { mkdir -p dspec && '
       'tar -xzf dspec.tar.gz -C dspec && bash dspec/launch/tpu_vm_setup.sh --bucket=our-runs; }'],
      [*tpus, 'tpu-vm', 'ssh', 'chain', *where, '--worker=all',
       '--command=bash dspec/launch/tpu_vm_run.sh ' + ' '.join(SENT)],
      [*tpus, 'tpu-vm', 'describe', 'chain', *where, '--format=value(state)'],
      [*tpus, 'queued-resources', 'delete', 'chain', *where, '--force'],
  ]


def test_flags_reach_the_run_as_they_were_typed(tmp_path):
  flags = [*FLAGS, '--config.cache_dir=/mnt/dspec/other', "--config.data.prompts=it's here.jsonl"]
  words = ['--dry_run', *QUEUED, '--runtime=next', f'--log_dir={tmp_path / "log"}', '--env=HF_TOKEN', '--', *flags]
  status, out, err = launch('tpu_queued_resources.sh', *words, HF_TOKEN='hf_secret')
  assert status == 0 and 'hf_secret' not in out + err and not list(tmp_path.iterdir())
  commands = [shlex.split(line) for line in out.splitlines()]
  assert '--runtime-version=next' in commands[3] and '--project' not in out
  run = commands[7][-1].removeprefix('--command=')
  assert shlex.split(run) == ['bash', 'dspec/launch/tpu_vm_run.sh', *flags]


@pytest.mark.parametrize('capacity', [[], ['--spot'], ['--reservation=ours', '--env=HF_TOKEN', '--max_restarts=3']])
def test_xpk(capacity):
  extra = ['--env-file=runs/launch/chain.env'] if '--env=HF_TOKEN' in capacity else []
  commands = dry('gke_xpk.sh', *GKE, '--project=lab', *capacity, '--', *FLAGS, HF_TOKEN='hf_secret')
  where = ['--cluster=tpus', '--zone=us-east5-b', '--project=lab']
  assert commands == [
      ['docker', 'build', '--platform=linux/amd64', '--tag=host.dev/project/dspec:1', f'--file={LAUNCH}/Dockerfile',
       str(ROOT)],
      ['docker', 'push', 'host.dev/project/dspec:1'],
      *([['mkdir', '-p', 'runs/launch']] if extra else []),
      ['xpk', 'workload', 'create', '--workload=chain', *where, '--tpu-type=v6e-16', '--num-slices=1',
       '--docker-image=host.dev/project/dspec:1', '--storage=dspec', f'--max-restarts={3 if extra else 100}',
       '--termination-grace-period-seconds=120', *capacity[:1], *extra,
       '--command=exec python -m dspec.main --multihost ' + ' '.join(SENT)],
      ['xpk', 'workload', 'list', *where, '--wait-for-job-completion=chain'],
  ]


def test_xpk_ends_as_the_workload_did(tmp_path):
  path = fake(tmp_path / 'bin', 'docker', '#!/bin/sh\nexit 1\n')
  fake(tmp_path / 'bin', 'xpk', '#!/bin/sh\necho xpk "$2" >>calls\n[ "$2" = create ] || exit 125\n')
  words = [*GKE, '--prebuilt', '--env=HF_TOKEN', '--', *FLAGS]
  status, _, err = launch('gke_xpk.sh', *words, cwd=tmp_path, PATH=path, HF_TOKEN='hf_secret')
  assert status == 125 and 'left: checkpoints and report in the bucket, as /mnt/dspec/runs/chain' in err
  assert (tmp_path / 'calls').read_text().split('\n')[:-1] == ['xpk create', 'xpk list']
  assert (tmp_path / 'runs/launch/chain.env').read_text() == 'HF_TOKEN\n'  # Its value is on no disk.


def test_the_image_has_what_it_runs():
  """Of the build's context only what Dockerfile copies is let through, and it is there."""
  copied = [line.split()[1] for line in (LAUNCH / 'Dockerfile').read_text().splitlines() if line.startswith('COPY')]
  allowed = [line[1:] for line in (LAUNCH / 'Dockerfile.dockerignore').read_text().splitlines() if line[0] == '!']
  assert sorted(copied) == sorted(allowed) and all((ROOT / name).exists() for name in copied)


# ---- Refusals --------------------------------------------------------------------------------------

TPU, XPK = ('tpu_queued_resources.sh', QUEUED), ('gke_xpk.sh', GKE)
SLURM, SETUP = ('slurm.sbatch', []), ('tpu_vm_setup.sh', [])
REFUSED = [
    (TPU, ['--name=Chain'], FLAGS, "--name: 'Chain' is not a name"),
    (TPU, ['--name='], FLAGS, '--name: its value is empty'),
    (TPU, ['--nmae=chain'], FLAGS, '--nmae: no such option with a value'),
    (TPU, ['--sport'], FLAGS, '--sport: no such option without a value'),
    (TPU, ['--zone=somewhere else'], FLAGS, "--zone: 'somewhere else'"),
    (TPU, ['--type=v5e-8'], FLAGS, '--type: v5e slices are called v5litepod-8'),
    (TPU, ['--type=v3-8'], FLAGS, "--type: 'v3-8' is none of"),
    (TPU, ['--type=v5p-12'], FLAGS, '--type: v5p-12: N counts TensorCores'),
    (TPU, ['--type=v6e-12'], FLAGS, '--type: v6e-12: N counts chips'),
    (TPU, ['--bucket=gs://our-runs'], FLAGS, "--bucket: 'gs://our-runs' is not the name of a bucket, without gs://"),
    (TPU, ['--spot', '--reserved'], FLAGS, '--reserved: not together with --spot'),
    (TPU, ['--poll=soon'], FLAGS, "--poll: 'soon'"),
    (TPU, ['--env=HF_TOKEN'], FLAGS, '--env: HF_TOKEN is not set'),
    (TPU, [], FLAGS[1:], '--config: missing after --'),
    (TPU, [], FLAGS[:1], '--workdir: missing after --'),
    (TPU, [], [FLAGS[0], '--workdir=gs://our-runs/chain'], "--workdir: 'gs://our-runs/chain' is not below /mnt/dspec"),
    (TPU, [], [*FLAGS, '--config.cache_dir=/local/c'], "--config.cache_dir: '/local/c' is not below /mnt/dspec"),
    (TPU, [], ['--config=experiments/none.py', FLAGS[1]], "--config: 'experiments/none.py' is no file"),
    (TPU, [], [*FLAGS, '--multihost'], '--multihost: is added'),
    (TPU, [], [*FLAGS, '--mode=generate'], '--mode: these scripts train'),
    (TPU, [], [*FLAGS, 'steps=1'], 'steps=1: flags of dspec.main read --name=value'),
    (XPK, ['--spot', '--reservation=ours'], FLAGS, '--reservation: not together with --spot'),
    (XPK, ['--storage=Our'], FLAGS, "--storage: 'Our' is not a name"),
    (XPK, ['--image=dspec'], FLAGS, "--image: 'dspec' is not HOST/PATH:TAG"),
    (XPK, [], [FLAGS[0], '--workdir=runs/chain'], "--workdir: 'runs/chain' is not below /mnt/dspec"),
    (SLURM, ['--pyton=x'], FLAGS, '--pyton: no such option with a value'),
    (SLURM, [], FLAGS, 'SLURM_JOB_ID: not set; submit this file with sbatch'),
    (SETUP, ['--bucket=A'], [], "--bucket: 'A' is not the name of a bucket"),
    (SETUP, [], FLAGS, '--config=experiments/targets/llama3_8b.py: takes no flags'),
]


def test_refusals_are_one_line_that_names_the_option(tmp_path):
  for tool in ('gcloud', 'docker', 'xpk', 'srun', 'python3', 'sudo', 'gcsfuse'):
    path = fake(tmp_path / 'bin', tool, '#!/bin/sh\ntouch "$0.called"\n')
  for (script, good), words, flags, message in REFUSED:
    status, out, err = launch(script, *good, *words, '--', *flags, cwd=tmp_path, PATH=path)
    assert (status, out) == (2, ''), message
    assert err.startswith(f'error: {message}') and err.count('\n') == 1, err
    assert [entry.name for entry in tmp_path.iterdir()] == ['bin'] and not list(tmp_path.glob('bin/*.called'))


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
if words[0] == 'storage':
  end(text=cloud['hierarchical'])
verb = words[3]
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
ROUND = ['create', 'scp', 'setup', 'run']
PREEMPTED = {'status': 255, 'left': [0, 'SUSPENDED', 'PREEMPTED']}


class Cloud:
  """A fake `gcloud` in `folder`, and the launcher run against it there."""

  def __init__(self, folder, plays, *, resource=None, granted=('WAITING_FOR_RESOURCES',) * 9, broken=(), flat=False):
    self.folder = folder
    # -S and -E: only the standard library, which is found sooner.
    self.path = fake(folder / 'bin', 'gcloud', CLOUD.format(python=f'{sys.executable} -SE', folder=str(folder)))
    state = {'resource': resource, 'node': 'READY', 'left': [], 'granted': list(granted), 'broken': list(broken)}
    state['hierarchical'] = '' if flat else 'True'
    (folder / 'cloud.json').write_text(json.dumps(state | {'plays': plays}))
    self.words = [*QUEUED, '--spot', '--poll=0', '--', *FLAGS]

  def run(self, *words, **variables):
    words = [*QUEUED, '--spot', '--poll=0', *words, '--', *FLAGS]
    return launch('tpu_queued_resources.sh', *words, cwd=self.folder, PATH=self.path, **variables)

  def calls(self):
    """What was done, in short: verbs, for ssh what for; without the looks at states and bucket."""
    short = []
    for line in (self.folder / 'calls').read_text().splitlines():
      words = json.loads(line)
      verb = words[3]
      if verb == 'ssh':
        command = words[-1].removeprefix('--command=')
        verb = 'setup' if '--alive' in command else command.removeprefix('bash dspec/launch/tpu_vm_run.sh ')
        verb = {' '.join(SENT): 'run', ' '.join(['--again', *SENT]): 'again'}.get(verb, verb)
      if words[0] != 'storage' and verb not in ('list', 'describe'):
        short.append(verb)
    return short

  def left(self):
    state = json.loads((self.folder / 'cloud.json').read_text())
    return state['resource'], state['plays']


@pytest.mark.parametrize('status, left', [
    (255, [0, 'SUSPENDED', 'PREEMPTED']),
    (1, [0, 'SUSPENDING', 'READY']),  # Machines that go may also break the run,
    (130, [0, 'ACTIVE', 'PREEMPTED']),  # or stop it, and the resource be late to say so;
    (134, [5, 'SUSPENDED', 'PREEMPTED']),  # and both.
])
def test_preempted_then_resumed_to_success(tmp_path, status, left):
  cloud = Cloud(tmp_path, [{'status': status, 'left': left}, {'status': 0}])
  returned, _, err = cloud.run()
  assert returned == 0, err
  assert cloud.calls() == [*ROUND, 'delete', *ROUND, 'delete'] and cloud.left() == (None, [])
  assert (tmp_path / 'runs/launch/chain/log.txt').read_text().splitlines() == ['training'] * 2
  assert 'left: checkpoints and report in gs://our-runs, as /mnt/dspec/runs/chain' in err and 'COST' not in err


@pytest.mark.parametrize('status', [1, 2, 137])
def test_a_run_that_fails_is_not_run_again(tmp_path, status):
  cloud = Cloud(tmp_path, [PREEMPTED, {'status': status}, {'status': 0}])
  assert cloud.run()[0] == status
  assert cloud.calls() == [*ROUND, 'delete', *ROUND, 'delete'] and cloud.left() == (None, [{'status': 0}])


def test_lost_connections_find_the_run_again(tmp_path):
  """And a run that somebody stopped resumes, on the same slice; and one that exists is taken over."""
  cloud = Cloud(tmp_path, [{'status': 255}, {'status': 143}, {'status': 255}, {'status': 0}], resource=['ACTIVE'])
  status, _, err = cloud.run()
  assert status == 0 and 'taking over chain, which is ACTIVE' in err
  again = ['scp', 'setup']
  assert cloud.calls() == [*again, 'run', *again, 'run', *again, 'again', *again, 'run', 'delete']


def test_failing_requests(tmp_path):
  """One that was never granted is wrong; after a preemption it is tried again, as is what gcloud fails to do."""
  for name in ('wrong', 'late'):
    (tmp_path / name).mkdir()
  cloud = Cloud(tmp_path / 'wrong', [], granted=[])
  status, _, err = cloud.run()
  assert status == 1 and 'the request failed' in err and cloud.calls() == ['create', 'delete']
  cloud = Cloud(
      tmp_path / 'late', [PREEMPTED, {'status': 0}], granted=['ACCEPTED', 'FAILED', 'PROVISIONING'], broken=['delete'])
  assert cloud.run()[0] == 0
  assert cloud.calls() == [*ROUND, 'delete', 'delete', 'create', 'delete', *ROUND, 'delete']


def test_nothing_is_requested_again_that_somebody_deleted(tmp_path):
  cloud = Cloud(tmp_path, [{'status': 255, 'left': [0, None, '']}])
  status, _, err = cloud.run()
  assert status == 1 and 'somebody deleted chain' in err and cloud.calls() == ROUND


def test_a_resource_that_cannot_be_deleted_is_told(tmp_path):
  cloud = Cloud(tmp_path, [{'status': 1}], broken=['delete'])
  status, _, err = cloud.run()
  assert status == 1 and cloud.left()[0] == ['ACTIVE']
  command = 'gcloud compute tpus queued-resources delete chain --zone=us-east5-b --quiet --force'
  assert f'LEFT, AT A COST: chain. Delete it: {command}' in err


def test_a_flat_bucket_is_refused_before_anything_costs(tmp_path):
  cloud = Cloud(tmp_path, [], flat=True)
  status, _, err = cloud.run()
  assert status == 2 and err.startswith('error: --bucket: our-runs has no hierarchical namespace')
  assert cloud.calls() == [] and not (tmp_path / 'runs').exists()


def test_what_is_sent(tmp_path):
  """The checkout, and the variables in a private file that is removed here afterwards."""
  cloud = Cloud(tmp_path, [{'status': 0}])
  gcloud = tmp_path / 'bin' / 'gcloud'
  keep = 'if "scp" in sys.argv:\n  import shutil\n  shutil.copy2("runs/launch/chain/dspec.env", "sent.env")\n'
  gcloud.write_text(gcloud.read_text().replace('words = sys.argv[1:]\n', keep + 'words = sys.argv[1:]\n', 1))
  assert cloud.run('--env=NOTE', NOTE="it's $HOME")[0] == 0
  assert stat.S_IMODE((tmp_path / 'sent.env').stat().st_mode) == 0o600
  shown = subprocess.run(
      ['bash', '-c', 'source sent.env; printf %s "$NOTE"'], cwd=tmp_path, capture_output=True, text=True, check=True)
  assert shown.stdout == "it's $HOME" and not (tmp_path / 'runs/launch/chain/dspec.env').exists()
  sent = subprocess.run(
      ['tar', '-tzf', tmp_path / 'runs/launch/chain/dspec.tar.gz'], capture_output=True, text=True, check=True).stdout
  needed = ['setup.py', 'requirements.txt', 'dspec/main.py', 'experiments/targets/llama3_8b.py',
            'launch/tpu_vm_setup.sh', 'launch/tpu_vm_run.sh', 'launch/common.sh']
  assert set(needed) <= set(sent.splitlines())


@pytest.mark.parametrize('number, status', [(signal.SIGINT, 130), (signal.SIGHUP, None)])
def test_ctrl_c_cleans_up_and_a_closed_terminal_does_not(tmp_path, number, status):
  cloud = Cloud(tmp_path, [{'status': 0, 'hangs': True}])
  process = subprocess.Popen(
      ['bash', str(LAUNCH / 'tpu_queued_resources.sh'), *cloud.words], cwd=tmp_path, env=environment(PATH=cloud.path),
      stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
      preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
  try:
    deadline = time.monotonic() + 60
    while not (tmp_path / 'hangs').exists() and time.monotonic() < deadline:
      time.sleep(0.05)
    os.killpg(process.pid, number)  # As a terminal does: to all of them.
    process.communicate(timeout=60)
  finally:
    if process.poll() is None:
      os.killpg(process.pid, signal.SIGKILL)
  if status:
    assert process.returncode == status
    assert cloud.calls() == [*ROUND, '--stop', 'delete'] and cloud.left()[0] is None
  else:
    assert process.returncode != 0
    assert cloud.calls() == ROUND and cloud.left()[0] == ['ACTIVE']


# ---- Cloud TPU: on a worker -------------------------------------------------------------------------

# Stands for Python: says what it was given, and follows `orders` in its home.
PLAYED_PYTHON = '''#!/bin/bash
trap 'echo saved; exit 130' TERM
echo "started with $* and ${NOTE-nothing} every ${TQDM_MININTERVAL}s"
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
    out, _ = process.communicate(timeout=60)
    return process.returncode, out

  def wait_started(self):
    """Until Python has spoken: its trap is set."""
    deadline = time.monotonic() + 60
    while not any('started' in log.read_text() for log in self.home.glob('dspec_run/*/log')):
      assert time.monotonic() < deadline, 'the run did not start'
      time.sleep(0.05)

  def order(self, status):
    (self.home / 'orders').write_text(str(status))


@pytest.fixture
def worker(tmp_path):
  made = Worker(tmp_path)
  yield made
  made.order(0)  # What a failed test leaves behind ends by itself.


def test_a_worker_tells_how_the_run_ended_and_runs_it_again_only_when_told(worker):
  worker.home.joinpath('dspec.env').write_text("export NOTE='a note'\n")
  worker.order(3)
  status, first = worker.do('--workdir=/w')
  assert status == 3
  assert first.partition('] ')[2] == 'started with -m dspec.main --multihost --workdir=/w and a note every 30s\n'
  worker.order(0)
  assert worker.do('--workdir=/w') == (3, first)
  assert worker.do('--again', '--workdir=/w') == (0, first * 2)
  assert worker.do('--alive')[0] == 1


def test_a_worker_survives_its_connection_and_is_stopped_after_saving(worker):
  lost = worker.attach('--workdir=/w')
  worker.wait_started()
  os.killpg(lost.pid, signal.SIGKILL)
  lost.communicate(timeout=60)
  assert worker.do('--alive')[0] == 0
  found = worker.attach('--again', '--workdir=/w')  # `--again` starts nothing beside a run that goes on.
  assert worker.do('--stop')[0] == 0
  out, _ = found.communicate(timeout=60)
  assert found.returncode == 130 and out.count('started') == 1 and out.endswith('saved\n')
  assert worker.do('--stop')[0] == 0  # There is nothing to stop.


def test_setup_commands(tmp_path):
  commands = dry('tpu_vm_setup.sh', '--bucket=our-runs', HOME=tmp_path)
  python = f'{tmp_path}/dspec_env/bin/python'
  assert commands[3:] == [
      ['sudo', 'apt-get', 'install', '--quiet', '--yes', '--option=DPkg::Lock::Timeout=600', 'gcsfuse'],
      ['sudo', 'install', '--directory', f'--owner={os.getuid()}', '/mnt/dspec'],
      ['gcsfuse', '--metadata-cache-ttl-secs=0', '--metadata-cache-negative-ttl-secs=0', '--rename-dir-limit=0',
       'our-runs', '/mnt/dspec'],
      ['python3', '-m', 'pip', 'install', '--quiet', '--user', 'uv'],
      ['python3', '-m', 'uv', 'venv', '--python=3.11', f'{tmp_path}/dspec_env'],
      ['python3', '-m', 'uv', 'pip', 'install', '--quiet', f'--python={python}', 'jax[tpu]', f'--editable={ROOT}'],
      [python, '-c', 'import sys, jax, libtpu, dspec; print("Python", sys.version.split()[0], "JAX", jax.__version__)'],
  ]
  assert dry('tpu_vm_setup.sh', HOME=tmp_path) == commands[6:]


def test_setup_twice(tmp_path):
  """The second time, the mount, uv and the environment are there and stay."""
  note = '#!/bin/bash\necho "${0##*/} ${*:1:1}" >>"$HOME/calls"\n'
  path = fake(tmp_path / 'bin', 'mountpoint', '#!/bin/sh\n[ -e "$HOME/mounted" ]\n')
  fake(tmp_path / 'bin', 'sudo', note)
  fake(tmp_path / 'bin', 'gcsfuse', f'{note}touch "$HOME/mounted"\n')
  fake(tmp_path / 'bin', 'python3', '''#!/bin/bash
echo "${*:2:2}" >>"$HOME/calls"
case "$*" in
  '-m uv --version') [[ -e $HOME/uv ]] ;;
  '-m pip install'*) touch "$HOME/uv" ;;
  '-m uv venv'*)
    mkdir -p "${@: -1}/bin" && printf '#!/bin/sh\\n' >"${@: -1}/bin/python" && chmod +x "${@: -1}/bin/python" ;;
esac
''')
  first = ['sudo install', 'gcsfuse --metadata-cache-ttl-secs=0', 'uv --version', 'pip install', 'uv venv', 'uv pip']
  for expected in (first, ['uv --version', 'uv pip']):
    (tmp_path / 'calls').unlink(missing_ok=True)
    status, _, err = launch('tpu_vm_setup.sh', '--bucket=our-runs', HOME=tmp_path, PATH=path)
    assert status == 0, err
    assert (tmp_path / 'calls').read_text().splitlines() == expected


# ---- One GPU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('has_gpu', [True, False])
def test_gpu_check(tmp_path, has_gpu):
  fake(tmp_path, 'python', f'#!/bin/sh\necho "$1 $2 $XLA_PYTHON_CLIENT_MEM_FRACTION" >>{tmp_path}/calls\n'
       f'[ "$1" != -c ] || exit {0 if has_gpu else 1}\n')
  status, _, err = launch('gpu_check.sh', f'--python={tmp_path}/python')
  calls = (tmp_path / 'calls').read_text().splitlines()
  assert calls[0].startswith('-c import jax')
  if has_gpu:
    assert (status, calls[1:]) == (0, ['-m pytest ', 'experiments/benchmarks/accelerator.py  .95'])
  else:
    assert status == 2 and len(calls) == 1 and 'sees no GPU' in err


# ---- Slurm ------------------------------------------------------------------------------------------

SHARED = ['--config=experiments/targets/llama3_8b.py:smoke', '--workdir=/shared/runs/chain']


def test_slurm_commands():
  job = {'SLURM_JOB_ID': 7, 'SLURM_CPUS_PER_TASK': 12, 'SLURM_GPUS_ON_NODE': 4, 'SLURM_NTASKS_PER_NODE': 4}
  assert dry('slurm.sbatch', '--python=/env/bin/python', '--', *SHARED, **job) == [
      ['srun', '--label', '--kill-on-bad-exit=0', '--cpus-per-task=12', '/env/bin/python', '-m', 'dspec.main',
       '--multihost', *SHARED],
      ['scontrol', 'show', 'job', '7'],
      ['scontrol', 'requeue', '7'],
  ]
  # sbatch reads its directives up to the first command.
  lines = (LAUNCH / 'slurm.sbatch').read_text().splitlines()
  first = next(i for i, line in enumerate(lines) if line and not line.startswith('#'))
  directives = [line.removeprefix('#SBATCH ') for line in lines[:first] if line.startswith('#SBATCH')]
  assert {'--requeue', '--signal=TERM@120', '--open-mode=append'} <= set(directives)
  assert not any(line.startswith('#SBATCH') for line in lines[first:])


@pytest.mark.parametrize('ends, job_state, requeued', [
    (0, 'RUNNING', False),
    (130, 'RUNNING', True),  # Preempted or at its time limit, after saving.
    (143, 'RUNNING', True),  # The same, before it trained.
    (130, 'COMPLETING', False),  # Cancelled, or put back by Slurm.
    (1, 'RUNNING', False),
])
def test_slurm_goes_back_into_the_queue_when_interrupted(tmp_path, ends, job_state, requeued):
  # The batch shell is signalled, too, and must outlive it.
  path = fake(tmp_path / 'bin', 'srun', f'#!/bin/bash\necho "srun $PWD $*" >>{tmp_path}/calls\n'
              f'(({ends} < 130)) || kill -TERM $PPID\nsleep 0.1\nexit {ends}\n')
  fake(tmp_path / 'bin', 'scontrol', f'#!/bin/bash\necho "scontrol $*" >>{tmp_path}/calls\n'
       f'[[ $1 != show ]] || echo "JobId=7 JobName=dspec\n   JobState={job_state} Reason=None"\n')
  # Slurm runs a copy, elsewhere.
  shutil.copy(LAUNCH / 'slurm.sbatch', tmp_path / 'slurm_script')
  done = subprocess.run(
      ['bash', tmp_path / 'slurm_script', '--', *SHARED], cwd=tmp_path, capture_output=True, text=True, check=False,
      env=environment(PATH=path, SLURM_JOB_ID=7, SLURM_SUBMIT_DIR=ROOT), timeout=60)
  assert done.returncode == ends, done.stderr
  show = ['scontrol show job 7'] if ends in (130, 143) else []
  assert (tmp_path / 'calls').read_text().splitlines() == [
      f'srun {ROOT} --label --kill-on-bad-exit=0 python -m dspec.main --multihost {" ".join(SHARED)}',
      *show, *(['scontrol requeue 7'] if requeued else [])]


def test_slurm_refuses_what_would_leave_gpus_idle(tmp_path):
  job = {'SLURM_JOB_ID': 7, 'SLURM_GPUS_ON_NODE': 8, 'SLURM_NTASKS_PER_NODE': 1}
  assert launch('slurm.sbatch', '--', *SHARED, **job) == (
      2, '', 'error: --ntasks-per-node: 1 on nodes with 8 GPUs; it takes one process for each\n')
  status, _, err = launch('slurm.sbatch', '--', *SHARED, SLURM_JOB_ID=7, SLURM_SUBMIT_DIR=tmp_path)
  assert status == 2 and err.startswith(f'error: {tmp_path} is not the top of the dspec repository')


# ---- All --------------------------------------------------------------------------------------------


def test_shellcheck():
  found = shutil.which('shellcheck', path=f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}')
  if not found:
    pytest.skip("shellcheck is not installed: pip install '.[test]'")
  scripts = [*sorted(LAUNCH.glob('*.sh')), LAUNCH / 'slurm.sbatch']
  done = subprocess.run([found, '-x', *scripts], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stdout


def test_scripts_are_strict_and_documented():
  readme = (LAUNCH / 'README.md').read_text()
  for script in [*LAUNCH.glob('*.sh'), LAUNCH / 'slurm.sbatch']:
    assert f'`{script.name}`' in readme
    if script.name != 'common.sh':
      assert 'set -euo pipefail' in script.read_text().splitlines()
      assert os.access(script, os.X_OK)
