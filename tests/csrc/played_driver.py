"""The host library on a CPU, with a driver played by C.

It is compiled with its operators registered for CPU tensors, and with a driver and a stream of the
test's own. The driver stores its last arguments, can refuse as the real one does, and has two
kernels that compute: one packs a weight, one multiplies by what is packed, or by a weight as it is.
Of a trained chain's kernels, and of those of its gradients, it stores how they were launched.
"""

import ctypes
import functools
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from built_once import built_once

from ksopt.jit import host
from ksopt.kernels import (
    dispatch,
    factor_epilogue,
    host_plans,
    host_products,
    weight_cache,
    weight_scopes,
    weight_table,
)
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.backends import cuda
from ksopt.kernels.candidate import Candidate
from ksopt.reference import ks_reference

PACK, MULTIPLY, MULTIPLY_AS_IT_IS, CHAIN, PACK_TRAINED, TRAINED = 2, 3, 4, 5, 6, 7
GRADIENTS, ADDING, PACK_INPUT_GRAD, INPUT_GRAD, PACK_CHAIN = 8, 9, 10, 11, 12
MULTIPLY_WITHIN = 14

DRIVER = r"""
#include <string.h>
struct Config {
  unsigned blocks[3], threads[3], shared;
  void *stream, *attributes;
  unsigned count;
};
struct Arguments {
  const float *x, *weight;
  float* y;
  long batch, x_batch, x_feature, y_batch, y_feature, weight_strides[4], weight_is_settled;
  const float *bias, *residual;
} arguments;
struct ChainArguments {
  const float *x, *weights, *bias, *residual;
  float* y;
  long batch, x_stride, y_stride, residual_stride, rows_per_block;
  const void *z, *hidden_bias; /* the last of an MLP, whose chains are packed as one matrix */
} chain;
struct PackArguments {
  const float* weights[4][4];
  long strides[4][4][4];
  float *packed, *packed_of_grad;
};
unsigned blocks;
int launches, has_context = 1, stream, capturing;
int settled; /* launches of products whose weight the kernel ahead does not write */
int packs, pattern[4], chain_features[3], in_sequence;
const float* packed_from;
enum { PACK = 2, MULTIPLY = 3, MULTIPLY_AS_IT_IS = 4, CHAIN = 5, PACK_TRAINED = 6, TRAINED = 7 };
enum { GRADIENTS = 8, ADDING = 9, PACK_INPUT_GRAD = 10, INPUT_GRAD = 11, PACK_CHAIN = 12 };
enum { MULTIPLY_WITHIN = 14 };
/* How a trained chain's two kernels were launched last, as `Seen` below has it. */
struct Seen {
  long number, blocks, threads, shared, attributes, stream;
  char arguments[656];
} trained[2], gradients[2]; /* the latter: those of a chain's gradients, and of their shares */
static void see(struct Seen* seen, const struct Config* config, const void* params, int size) {
  *seen = (struct Seen){launches, config->blocks[0], config->threads[0], config->shared,
                        config->count, (long)config->stream};
  memcpy(seen->arguments, params, size);
}
/* What is packed, of any strides, cannot be mistaken for a weight. */
static void pack() {
  float* to = arguments.y;
  const long* strides = arguments.weight_strides;
  for (int i = 0; i < pattern[0]; ++i)
    for (int k = 0; k < pattern[1]; ++k)
      for (int l = 0; l < pattern[2]; ++l)
        for (int j = 0; j < pattern[3]; ++j)
          *to++ = -2 * arguments.weight[i * strides[0] + k * strides[1] + l * strides[2] +
                                        j * strides[3]];
  packed_from = arguments.weight;
  ++packs;
}
/* By a weight whose elements are in order, over `packed`. */
static void multiply(float packed) {
  const int a = pattern[0], b = pattern[1], c = pattern[2], d = pattern[3];
  for (long row = 0; row < arguments.batch; ++row)
    for (int i = 0; i < a; ++i)
      for (int k = 0; k < b; ++k)
        for (int j = 0; j < d; ++j) {
          const float* x = arguments.x + row * arguments.x_batch;
          float sum = 0;
          for (int l = 0; l < c; ++l)
            sum += x[((i * c + l) * d + j) * arguments.x_feature] *
                   arguments.weight[((i * b + k) * c + l) * d + j] / packed;
          arguments.y[row * arguments.y_batch + ((i * b + k) * d + j) * arguments.y_feature] = sum;
        }
}
/* relu(y + bias) + residual, where they are. */
static void add_epilogue() {
  const int outputs = pattern[0] * pattern[1] * pattern[3];
  for (long at = 0; at < arguments.batch * outputs; ++at) {
    float sum = arguments.y[at] + (arguments.bias ? arguments.bias[at % outputs] : 0);
    arguments.y[at] = (sum > 0 ? sum : 0) + (arguments.residual ? arguments.residual[at] : 0);
  }
}
/* x, of one row, by a factor with any strides. */
static void multiply_row(float* x, const float* weight, const long* strides) {
  const int a = pattern[0], b = pattern[1], c = pattern[2], d = pattern[3];
  float y[256];
  for (int i = 0; i < a; ++i)
    for (int k = 0; k < b; ++k)
      for (int j = 0; j < d; ++j) {
        const float* row = weight + i * strides[0] + k * strides[1] + j * strides[3];
        float sum = 0;
        for (int l = 0; l < c; ++l) sum += x[(i * c + l) * d + j] * row[l * strides[2]];
        y[(i * b + k) * d + j] = sum;
      }
  memcpy(x, y, sizeof(float) * a * b * d);
}
/* Chains as one matrix: side by side, or one behind the other. */
static void pack_chain(const struct PackArguments* from) {
  const int outputs = pattern[0] * pattern[1] * pattern[3], columns = chain_features[1];
  for (int in = 0; in < chain_features[0]; ++in) {
    float x[256];
    for (int at = 0; at < 4 && from->weights[at][0]; ++at) {
      if (at == 0 || !in_sequence) {
        memset(x, 0, sizeof x);
        x[in] = 1;
      }
      for (int factor = 0; factor < 4 && from->weights[at][factor]; ++factor)
        multiply_row(x, from->weights[at][factor], from->strides[at][factor]);
      float* to = from->packed + in * columns + (in_sequence ? 0 : at * outputs);
      memcpy(to, x, sizeof(float) * outputs);
    }
  }
  ++packs;
}
static float chain_sum(long row, int out) {
  float sum = chain.bias ? chain.bias[out] : 0;
  for (int in = 0; in < chain_features[0]; ++in)
    sum += chain.x[row * chain.x_stride + in] * chain.weights[in * chain_features[1] + out];
  return sum;
}
/* y = relu(x W + bias) + residual by all blocks; the weights are packed as one matrix W. Where y
   has half of its outputs, the others are multiplied with them. */
static void multiply_chain() {
  const int outputs = chain_features[2];
  for (long block = 0; block < blocks; ++block)
    for (long at = 0; at < chain.rows_per_block; ++at) {
      const long row = block * chain.rows_per_block + at;
      for (int out = 0; row < chain.batch && out < outputs; ++out) {
        float sum = chain_sum(row, out);
        sum = sum > 0 ? sum : 0;
        if (outputs < chain_features[1]) sum *= chain_sum(row, outputs + out);
        sum += chain.residual ? chain.residual[row * chain.residual_stride + out] : 0;
        chain.y[row * chain.y_stride + out] = sum;
      }
    }
}
int cuLaunchKernelEx(const struct Config* config, void* kernel, void** params, void** extra) {
  if (!has_context) return 201;
  blocks = config->blocks[0];
  ++launches;
  if (kernel == (void*)CHAIN) {
    chain = *(struct ChainArguments*)params[0];
    multiply_chain();
    return 0;
  }
  if (kernel == (void*)PACK_CHAIN) {
    pack_chain(params[0]);
    return 0;
  }
  if (kernel == (void*)PACK_TRAINED || kernel == (void*)TRAINED) {
    const int is_pack = kernel == (void*)PACK_TRAINED;
    see(&trained[is_pack ? 0 : 1], config, params[0], is_pack ? sizeof(struct PackArguments) : 96);
    return 0;
  }
  if (kernel == (void*)GRADIENTS || kernel == (void*)ADDING) {
    const int is_adding = kernel == (void*)ADDING;
    see(&gradients[is_adding], config, params[0], is_adding ? 400 : 520);
    return 0;
  }
  if (kernel == (void*)PACK_INPUT_GRAD || kernel == (void*)INPUT_GRAD) {
    const int is_pack = kernel == (void*)PACK_INPUT_GRAD;
    see(&trained[is_pack ? 0 : 1], config, params[0], is_pack ? sizeof(struct PackArguments) : 120);
    return 0;
  }
  arguments = *(struct Arguments*)params[0];
  settled += arguments.weight_is_settled;
  if (kernel == (void*)PACK) pack();
  if (kernel == (void*)MULTIPLY) multiply(-2);
  if (kernel == (void*)MULTIPLY_AS_IT_IS) multiply(1);
  if (kernel == (void*)MULTIPLY_WITHIN) {
    multiply(-2);
    add_epilogue();
  }
  return kernel == (void*)13 ? 1 : 0;
}
int cuGetErrorString(int status, const char** words) {
  *words = status == 1 ? "unlucky" : "?";
  return 0;
}
int cuDeviceGet(int* handle, int ordinal) { *handle = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int handle) { *context = &blocks; return 0; }
int cuCtxSetCurrent(void* context) { has_context = context == &blocks; return 0; }
int aoti_torch_get_current_cuda_stream(int device, void** params) {
  *params = (void*)(long)stream;
  return 0;
}
int cuStreamIsCapturing(void* queried, int* answer) {
  *answer = capturing;
  return 0;
}
"""


def library(optimize=False):
    """``torch.ops.ksopt_host_on_cpu``, which can be registered once, and the driver's variables.

    Args:
        optimize: whether the compiler does, which takes longer: where calls are timed.
    """
    compiler = shutil.which("cc")
    if compiler is None or shutil.which("c++") is None:
        pytest.skip("no C and C++ compiler on this machine")

    def build_driver(path):
        code = path.with_suffix(".c")
        code.write_text(DRIVER)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(code)], check=True)

    driver = built_once("driver.so", build_driver)
    name = f"ksopt_host_on_cpu{'_optimized' if optimize else ''}.so"
    built = built_once(name, functools.partial(build, driver=driver, optimize=optimize))
    torch.ops.load_library(str(built))
    return SimpleNamespace(ops=torch.ops.ksopt_host_on_cpu, driver=ctypes.CDLL(str(driver)))


def build(path, driver, optimize):
    """Compile the library that loads the driver."""
    sources = host._sources()
    for real, played in {
        '"libcuda.so.1"': f'"{driver}"',
        '"libtorch_cuda.so"': f'"{driver}"',
        "ksopt_host, CUDA": "ksopt_host, CPU",
        "key == c10::DispatchKey::CUDA": "key == c10::DispatchKey::CPU",
        "key = c10::DispatchKey::CUDA": "key = c10::DispatchKey::CPU",
        "(ksopt_host,": "(ksopt_host_on_cpu,",
        "torch::stable::accelerator::getCurrentDeviceIndex() != device": "false",
    }.items():
        assert any(real in source for source in sources.values())
        sources = {name: source.replace(real, played) for name, source in sources.items()}
    flags = host._flags()
    if not optimize:
        flags = ["-O0" if flag == "-O2" else flag for flag in flags]
    path.write_bytes(host._compile("c++", sources, flags))


def stand_ins(library):
    """What stands for what, where the library is in the place of the real one: module, name, value.

    The CPU is in that of a CUDA device, and nothing is known yet.
    """
    ops = library.ops
    return [
        (torch.ops, "ksopt_host", ops),
        (dispatch, "run_known", cuda.run_known),
        (dispatch, "run_known_repacked", cuda.run_known_repacked),
        (dispatch, "run", cuda.run),
        (dispatch, "run_within", cuda.run_within),
        (factor_epilogue, "_launchers", {}),
        (factor_epilogue, "_registered", set()),
        (weight_cache, "is_capturing", lambda _: False),
        (host_products, "_run_product", None),
        (host_plans, "_run_layer", None),
        (weight_scopes, "_mark_repacked", ops.mark_repacked.default._op),
        (weight_scopes, "_mark_recorded", ops.mark_recorded.default._op),
        (weight_table, "_note_in_library", ops.note_prepared.default._op),
    ]


class Seen(ctypes.Structure):
    """A launch, as the driver keeps it."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("number", "blocks", "threads", "shared_bytes")),
        *((name, ctypes.c_long) for name in ("attributes", "stream")),
        ("arguments", ctypes.c_byte * 656),
    ]

    @property
    def grid(self):
        """Blocks, threads, bytes of shared memory."""
        return self.blocks, self.threads, self.shared_bytes


def trained(library):
    """How a trained chain or its input gradient was launched last: what packs, what multiplies."""
    return (Seen * 2).in_dll(library.driver, "trained")


def of_gradients(library):
    """How a chain's gradients were launched last, and what adds their shares."""
    return (Seen * 2).in_dll(library.driver, "gradients")


def variable(library, name):
    """One of the driver's, to read and to set."""
    return ctypes.c_int.in_dll(library.driver, name)


def packed_from(library):
    """The address of the weight that the driver packed last."""
    return ctypes.c_void_p.in_dll(library.driver, "packed_from").value


def multiplies_by(library, pattern):
    """The driver's kernels multiply by weights of this pattern from here on."""
    for at, value in enumerate(pattern.weight_shape):
        (ctypes.c_int * 4).in_dll(library.driver, "pattern")[at] = value


def known(library, x, weight, last=False, repacked=False, out=None):
    """y, where the library's table knows the product."""
    return library.ops.run_product(x, weight, last, None, repacked, out)


def note(library, weight, prepared, form, stream=0):
    """Let the library know of what was prepared of a weight, for as long as that lives."""
    owner = weight_scopes.root_of(weight)
    library.ops.note_prepared([weight], [owner], [owner._version], prepared, prepared, form, stream)


def chain_of(library, chain, siblings=1, parts=None, in_sequence=False):
    """The driver's chain has these features from here on; its result has those of ``parts``."""
    variable(library, "in_sequence").value = in_sequence
    features = (ctypes.c_int * 3).in_dll(library.driver, "chain_features")
    parts = siblings if parts is None else parts
    features[:] = (chain.in_features, siblings * chain.out_features, parts * chain.out_features)


def decide(x, weight, launcher, family=None):
    """The product of such operands, batch first, is this launcher's, of a family or none."""
    key = cuda.problem_key_of(x, weight, False)
    choice = Choice(Candidate("played", key.problem, 1.0, family), launcher, "model")
    cuda.remember(key, x.get_device(), Decision(choice, choice))


class Product:
    """A product that is decided; who inherits has an x and a weight."""

    def known(self):
        """y, if it takes no decision and no preparation."""
        return cuda.run_known(self.x, self.weight, False)

    def check(self, y):
        expected = ks_reference(self.x, self.weight.detach())
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
