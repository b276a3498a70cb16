"""Public names of the harness."""

from forge_rl.harness.benchmarks import Benchmark as Benchmark
from forge_rl.harness.benchmarks import benchmark as benchmark
from forge_rl.harness.benchmarks import benchmark_source as benchmark_source
from forge_rl.harness.function_calls import FunctionCalls as FunctionCalls
from forge_rl.harness.ifeval import IFEval as IFEval
from forge_rl.harness.lm_eval import LmEvalConfig as LmEvalConfig
from forge_rl.harness.lm_eval import run_lm_eval as run_lm_eval
from forge_rl.harness.results_file import Results as Results
