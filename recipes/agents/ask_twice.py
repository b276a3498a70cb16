"""An agent on plain HTTP: asks a question, and asks again if the answer has no number.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python ask_twice.py < task.json
"""

import json
import os
import re
import sys
import urllib.request

messages = json.load(sys.stdin)["messages"]
answer = ""
for _ in range(2):
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ.get("FORGE_RL_MODEL", "gpt-4o-mini"), "messages": messages}).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    answer = message["content"] or ""
    if re.search(r"\d", answer):
        break
    messages += [message, {"role": "user", "content": "Answer with a number, nothing else."}]
print(json.dumps({"answer": answer}))
