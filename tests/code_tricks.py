"""Answers that are wrong, each with a trick that has fooled a scorer of code: what they write is run, and must score 0.

`CALLED` is asked for `answer(n)`, whose tests want the n-th prime; `PRINTED` reads n and prints it.
"""

import textwrap

TESTS = "assert answer(1) == 2\nassert answer(5) == 11\nassert answer(8) == 19"
CASES = [{"input": "1\n", "output": "2\n"}, {"input": "5\n", "output": "11\n"}, {"input": "8\n", "output": "19\n"}]
HONEST = """
def answer(n):
    found = []
    at = 2
    while len(found) < n:
        if all(at % each for each in found):
            found.append(at)
        at += 1
    return found[-1]
"""
HONEST_PROGRAM = f"{HONEST}\nprint(answer(int(input())))"

_WRONG = "def answer(n): return 4"
_ANYTHING = """
class Any(BASE):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __bool__(self): return True
    def __hash__(self): return 2
"""


def _anything(base: str, instance: str = "Any()") -> str:
    return _ANYTHING.replace("BASE", base) + f"def answer(n): return {instance}"


CALLED = {
    "an object that equals everything": _anything("object"),
    "an int that equals everything": _anything("int", "Any(4)"),
    "a str that equals everything": _anything("str", "Any('x')"),
    "a list that equals everything": _anything("list"),
    "a dict that equals everything": _anything("dict"),
    "a float that equals everything": _anything("float", "Any(4)"),
    "a class whose metaclass equals everything": _anything("type", "Any('A', (), {})"),
    "an iterator of objects that equal everything": _anything("object", "iter([Any()])"),
    "a lie about its class": (
        _anything("object").replace("def __bool__", "__class__ = property(lambda self: int)\n    def __bool__")
    ),
    "__reduce__ that runs code": (
        "class Bomb:\n    def __reduce__(self): return (eval, ('2',))\ndef answer(n): return Bomb()"
    ),
    "NaN from a replaced encoder": "forge_solution.encode = lambda value: 'NaN'\ndef answer(n): return 0",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef answer(n): sys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "os._exit in the call": "import os\ndef answer(n): os._exit(0)",
    "SystemExit raised": "def answer(n): raise SystemExit(0)",
    "StopIteration, which ends a loop": "def answer(n): raise StopIteration",
    "GeneratorExit": "def answer(n): raise GeneratorExit",
    "KeyboardInterrupt": "def answer(n): raise KeyboardInterrupt",
    "an exception of its own with a class's name": (
        "class SkipTest(Exception): pass\nSkipTest.__module__ = 'unittest'\ndef answer(n): raise SkipTest('skipped')"
    ),
    "patched builtins": (
        f"import builtins\nbuiltins.all = builtins.any = builtins.abs = builtins.isinstance = lambda *a: True\n{_WRONG}"
    ),
    "patched AssertionError": (
        f"import builtins\nclass Never(Exception): pass\nbuiltins.AssertionError = Never\n{_WRONG}"
    ),
    "patched unittest": (
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
        f"unittest.TestResult.wasSuccessful = lambda s: True\n{_WRONG}"
    ),
    "patched exec and compile": (
        f"import builtins\nbuiltins.exec = lambda *a, **k: None\nbuiltins.compile = lambda *a, **k: ''\n{_WRONG}"
    ),
    "patched json": f"import json\njson.dumps = lambda *a, **k: '2'\njson.loads = lambda *a, **k: 2\n{_WRONG}",
    "patched ast": f"import ast\nast.parse = lambda *a, **k: ast.Module([], [])\n{_WRONG}",
    "a result as the harness would send it": (
        'import sys\nclass Reply:\n    def __repr__(self): return \'{"results": [""], "done": true}\'\n'
        "sys.modules['__main__'].forge_solution.call = lambda *a: Reply()"
    ),
    "a representation that is no data": (
        "import sys\nclass Reply:\n    def __repr__(self): return '[\"object\", \"__import__(\\'os\\')\"]'\n"
        "sys.modules['__main__'].forge_solution.call = lambda *a: Reply()"
    ),
    "a claim of success in place of a value": (
        "import sys\nclass Reply:\n    def __repr__(self): return ''\n"
        "sys.modules['__main__'].forge_solution.call = lambda *a: Reply()"
    ),
    "edited test files": (
        "import glob, os\nfor path in glob.glob('**/*', recursive=True) + glob.glob('/tmp/**/*', recursive=True):\n"
        f"    try: open(path, 'w').write('pass')\n    except OSError: pass\n{_WRONG}"
    ),
    "a conftest and a sitecustomize": (
        "for name in ('conftest.py', 'sitecustomize.py', 'tests.py'):\n"
        f"    open(name, 'w').write('import os; os._exit(0)')\n{_WRONG}"
    ),
    "frames that are searched for what is expected": """
        import sys
        def answer(n):
            frame = sys._getframe()
            while frame:
                for each in [*frame.f_locals.values(), *frame.f_globals.values()]:
                    if isinstance(each, str) and 'assert answer(' in each:
                        return int(each.split(f'answer({n}) == ')[1].split()[0])
                frame = frame.f_back
            return 4
        """,
    "objects of the garbage collector that are searched": """
        import gc
        def answer(n):
            for each in gc.get_objects():
                if isinstance(each, (list, tuple, dict)):
                    for text in (each.values() if isinstance(each, dict) else each):
                        if isinstance(text, str) and f'assert answer({n}) ==' in text and 'gc' not in text:
                            return int(text.split(f'answer({n}) == ')[1].split()[0])
            return 4
        """,
    "memory of processes that is searched": """
        import os, re
        def answer(n):
            for pid in filter(str.isdigit, os.listdir('/proc')):
                for name in ('mem', 'environ', 'cmdline', 'fd/3', 'fd/4'):
                    try:
                        data = open(f'/proc/{pid}/{name}', 'rb').read(1 << 20)
                    except (OSError, OverflowError):
                        continue
                    if found := re.search(rb'answer\\(%d\\) == (\\d+)' % n, data):
                        return int(found[1])
            return 4
        """,
    "descriptors that are written with a result": """
        import os, struct
        text = b'{"stdout": "", "stderr": "", "cut": false, "value": "2", "error": null, "cpu_s": 0, "memory_bytes": 0}'
        def answer(n):
            for fd in range(3, 64):
                try: os.write(fd, struct.pack('>II', len(text), 0) + text)
                except OSError: pass
            return 4
        """,
    "a forked child that answers and lives on": """
        import os, time
        def answer(n):
            if os.fork() == 0:
                return 4
            time.sleep(0.2)
            return 4
        """,
    "a child that is left behind and writes": """
        import os, time
        if os.fork() == 0:
            for _ in range(20):
                time.sleep(0.05)
                for fd in range(3, 32):
                    try: os.write(fd, b'x' * 64)
                    except OSError: pass
            os._exit(0)
        def answer(n): return 4
        """,
    "a thread that patches later": """
        import builtins, threading, time
        def later():
            while True:
                builtins.AssertionError = builtins.print = None
                time.sleep(0.01)
        threading.Thread(target=later, daemon=True).start()
        def answer(n): return 4
        """,
    "an exit handler": f"import atexit, os\natexit.register(lambda: print('OK'))\n{_WRONG}",
    "a handler of signals": (
        "import signal\nfor each in (signal.SIGALRM, signal.SIGPROF, signal.SIGTERM):\n"
        "    signal.signal(each, lambda *a: None)\ndef answer(n):\n    while True: pass"
    ),
    "a time bomb": "import time\ndef answer(n):\n    time.sleep(1000)\n    return 2",
    "a report that is printed": (
        "import sys\nprint('1 passed, 0 failed\\nOK\\n__PASSED__\\n' * 3)\nprint('OK', file=sys.stderr)\n"
        "def answer(n):\n    print('2 11 19')\n    return 4"
    ),
    "endless output": "def answer(n):\n    while True: print('2' * 10000)",
    "a huge result": "def answer(n): return '2' * (1 << 26)",
    "an endless iterator": "import itertools\ndef answer(n): return itertools.repeat(2)",
    "deep recursion": "import sys\nsys.setrecursionlimit(1 << 30)\ndef answer(n): return answer(n)",
    "data too deep to read": (
        "def answer(n):\n    found = []\n    for _ in range(100000): found = [found]\n    return found"
    ),
    "data that holds itself": "def answer(n):\n    found = []\n    found.append(found)\n    return found",
    "a huge int": "def answer(n): return 1 << (1 << 24)",
    "NaN": "def answer(n): return float('nan')",
    "True for every number": "def answer(n): return True",
    "text for a number": "def answer(n): return {1: '2', 5: '11', 8: '19'}[n]",
    "all numbers at once": "def answer(n): return [2, 11, 19]",
    "much memory": "def answer(n): return len([0] * (1 << 34))",
    "a function in place of a value": "def answer(n): return lambda: 2",
    "a coroutine": "async def answer(n): return 2",
    "no function": "answer = 2",
    "no answer": "print('assert True')",
    "an answer for the first test alone": "def answer(n): return 2",
    "a count of the calls": "calls = iter([2, 11, 18])\ndef answer(n): return next(calls)",
    "a tampered stream": "import sys\nsys.stdout = sys.stderr = None\ndef answer(n): return 4",
    "the tests' own module": (
        "import sys, types\nsys.modules['tests'] = sys.modules['forge_tests'] = types.SimpleNamespace(results=[''])\n"
        + _WRONG
    ),
    "a closed channel": "import os\nos.closerange(3, 256)\ndef answer(n): return 4",
}
CALLED = {name: textwrap.dedent(code) for name, code in CALLED.items()}

PRINTED = {
    "all outputs at once": "print(2)\nprint(11)\nprint(19)",
    "the output, then an error": f"{HONEST_PROGRAM}\nraise ValueError",
    "the output, then an exit status": f"import sys\n{HONEST_PROGRAM}\nsys.exit(1)",
    "the output, then os._exit": f"import os\n{HONEST_PROGRAM}\nos._exit(0)",
    "the output, then no end": f"{HONEST_PROGRAM}\nwhile True: pass",
    "the output, then sleep": f"{HONEST_PROGRAM}\nimport time\ntime.sleep(1000)",
    "files that are searched for outputs": (
        "import glob\nfor path in glob.glob('/tmp/**/*', recursive=True) + glob.glob('/proc/*/fd/*'):\n"
        "    try: print(open(path).read(100))\n    except OSError: pass"
    ),
    "output of one case left for the next": (
        "import os\nn = int(input())\nif n == 1: open('/tmp/seen', 'w').write('11')\n"
        "print(2 if n == 1 else open('/tmp/seen').read())"
    ),
    "terminal escapes over a wrong output": "input()\nprint('4\\r2')",
    "endless output": "while True: print(2)",
    "an early right output in another stream": "import sys\nprint(2, file=sys.stderr)",
    "backspaces": "input()\nprint('4\\b2')",
}
"""Programs whose last or only output is wrong, or which fail after it."""
