"""Separate uses of client packages: `python client_uses.py BASE_URL KEY MODEL [ONLY]`.

Runs in the packages' environment and prints a line of JSON for each. A small model answers nonsense, so only the form
of an answer is checked.
"""

import asyncio
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from typing import Any, Literal

URL, KEY, MODEL, ONLY = (*sys.argv[1:], "")[:4]
ROOT = URL.removesuffix("/v1")
os.environ.update(
    OPENAI_BASE_URL=URL, OPENAI_API_KEY=KEY, ANTHROPIC_BASE_URL=ROOT, ANTHROPIC_API_KEY=KEY,
    OPENAI_AGENTS_DISABLE_TRACING="1", LITELLM_LOCAL_MODEL_COST_MAP="True", NO_PROXY="*",
)  # fmt: skip
USES: list[tuple[str, str, Callable[[], Any]]] = []
ASK: Any = [{"role": "user", "content": "What is 2 + 3? Say it in a word."}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "colour": {"enum": ["red", "blue"]}},
    "required": ["sure", "colour"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
FLAT: Any = {"type": "function", "name": "paint", "description": "Paints.", "parameters": SCHEMA, "strict": True}
THEIRS: Any = {"name": "paint", "description": "Paints.", "input_schema": SCHEMA}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "Paint", "schema": SCHEMA, "strict": True}}
NAMED: Any = {"type": "function", "function": {"name": "paint"}}


def use(package: str, feature: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def note(function: Callable[[], Any]) -> Callable[[], Any]:
        USES.append((package, feature, function))
        return function

    return note


def need(condition: Any, evidence: Any = "") -> None:
    if not condition:
        raise AssertionError(f"got {str(evidence)[:200]!r}")


def painted(arguments: Any) -> None:
    values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    need(isinstance(values["sure"], bool) and values["colour"] in ("red", "blue"), values)


def model_type() -> Any:
    from pydantic import BaseModel

    class Paint(BaseModel):
        sure: bool
        colour: Literal["red", "blue"]

    return Paint


# openai


def openai_chat(**more: Any) -> Any:
    import openai

    return openai.OpenAI(max_retries=0).chat.completions.create(
        **{"model": MODEL, "messages": ASK, "max_tokens": 40} | more
    )


@use("openai", "chat")
def _() -> None:
    need(openai_chat().choices[0].message.content)


@use("openai", "stream")
def _() -> None:
    chunks = list(openai_chat(stream=True, stream_options={"include_usage": True}))
    need(any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks) and chunks[-1].usage)


@use("openai", "n, logprobs")
def _() -> None:
    answer = openai_chat(n=3, logprobs=True, top_logprobs=2)
    need(len(answer.choices) == 3 and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2)


@use("openai", "top_p, penalties, logit_bias, seed, stop")
def _() -> None:
    more = {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": -100}}
    need(openai_chat(**more, seed=1, stop=["\n"]).choices)


@use("openai", "tools auto")
def _() -> None:
    message = openai_chat(tools=[TOOL]).choices[0].message
    need(message.content or message.tool_calls)


for _feature, _choice in (("tools required", "required"), ("tools named", NAMED)):
    for _stream in (False, True):

        @use("openai", _feature + ", stream" * _stream)
        def _(choice: Any = _choice, stream: bool = _stream) -> None:
            more = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 120}
            if stream:
                parts = [
                    call.function.arguments or ""
                    for chunk in openai_chat(stream=True, **more)
                    for call in (chunk.choices[0].delta.tool_calls or [] if chunk.choices else [])
                ]
                painted("".join(parts))
            else:
                message = openai_chat(**more).choices[0].message
                need(message.tool_calls, message)
                painted(message.tool_calls[0].function.arguments)


@use("openai", "a tool's output is answered")
def _() -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "paint", "arguments": '{"sure": true, "colour": "red"}'},
    }
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    message = openai_chat(messages=messages, tools=[TOOL]).choices[0].message
    need(message.content or message.tool_calls)


@use("openai", "json_object")
def _() -> None:
    text = openai_chat(response_format={"type": "json_object"}).choices[0].message.content
    need(text.strip().startswith("{"), text)


@use("openai", "json_schema")
def _() -> None:
    painted(openai_chat(response_format=FORM, max_tokens=120).choices[0].message.content)


@use("openai", "parse to a model")
def _() -> None:
    import openai

    done = openai.OpenAI().chat.completions.parse(
        model=MODEL, messages=ASK, response_format=model_type(), max_tokens=120
    )
    need(done.choices[0].message.parsed, done)


@use("openai", "completions, echo")
def _() -> None:
    import openai

    done = openai.OpenAI().completions.create(model=MODEL, prompt="Once upon", echo=True, max_tokens=9)
    need(done.choices[0].text.startswith("Once upon"), done)


def response(**more: Any) -> Any:
    import openai

    client: Any = openai.OpenAI()
    return client.responses.create(**{"model": MODEL, "input": "What is 2 + 3?", "max_output_tokens": 120} | more)


@use("openai", "responses")
def _() -> None:
    need(response(instructions="Be brief.").output_text)


@use("openai", "responses, stream")
def _() -> None:
    events = list(response(stream=True))
    need(events[-1].type == "response.completed" and events[-1].response.output_text, events[-1])


@use("openai", "responses, tools required")
def _() -> None:
    done = response(tools=[FLAT], tool_choice="required")
    calls = [item for item in done.output if item.type == "function_call"]
    need(calls, done.output)
    painted(calls[0].arguments)


@use("openai", "responses, parse to a model")
def _() -> None:
    import openai

    done = openai.OpenAI().responses.parse(model=MODEL, input="Paint!", text_format=model_type(), max_output_tokens=120)
    need(done.output_parsed, done)


# openai-agents


def agents_run(stream: bool = False, chat: bool = False, **more: Any) -> Any:
    import agents
    import openai

    model: Any = MODEL
    if chat:
        model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=openai.AsyncOpenAI())
    settings = more.pop("model_settings", {})
    agent = agents.Agent(
        name="Painter", instructions="Be brief.", model=model,
        model_settings=agents.ModelSettings(**{"max_tokens": 300, "temperature": 0} | settings), **more,
    )  # fmt: skip

    async def run() -> Any:
        if not stream:
            return await agents.Runner.run(agent, ASK[0]["content"], max_turns=3)
        running = agents.Runner.run_streamed(agent, ASK[0]["content"])
        need([event async for event in running.stream_events()])
        return running

    return asyncio.run(run())


@use("openai-agents", "responses (its default)")
def _() -> None:
    need(agents_run().final_output)


@use("openai-agents", "stream")
def _() -> None:
    need(agents_run(stream=True).final_output)


@use("openai-agents", "chat completions")
def _() -> None:
    need(agents_run(chat=True).final_output)


@use("openai-agents", "output_type")
def _() -> None:
    need(agents_run(output_type=model_type()).final_output.colour in ("red", "blue"))


for _chat in (False, True):

    @use("openai-agents", "tool required" + ", chat completions" * _chat)
    def _(chat: bool = _chat) -> None:
        import agents

        colours: list[Any] = []

        @agents.function_tool
        def paint(sure: bool, colour: Literal["red", "blue"]) -> str:
            """Paints."""
            colours.append(colour)
            return "done"

        agents_run(chat=chat, tools=[paint], model_settings={"tool_choice": "required"})
        need(colours, "no call")


# langchain


def chain(**more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(**{"model": MODEL, "max_tokens": 120, "max_retries": 0} | more)


@use("langchain-openai", "invoke")
def _() -> None:
    need(chain(temperature=0).invoke("What is 2 + 3?").content)


@use("langchain-openai", "stream")
def _() -> None:
    need("".join(part.content for part in chain().stream("What is 2 + 3?")))


@use("langchain-openai", "logprobs")
def _() -> None:
    need(chain(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]["content"])


@use("langchain-openai", "responses")
def _() -> None:
    need(chain(use_responses_api=True).invoke("What is 2 + 3?").text)


@use("langchain-openai", "tools any")
def _() -> None:
    painted(chain().bind_tools([TOOL], tool_choice="any").invoke("Paint!").tool_calls[0]["args"])


for _method in ("json_schema", "function_calling"):

    @use("langchain-openai", f"with_structured_output {_method}")
    def _(method: Any = _method) -> None:
        done = chain().with_structured_output(model_type(), method=method, include_raw=True).invoke("Paint!")
        need(done["parsed"], done["raw"])


@use("langchain", "create_agent with a tool")
def _() -> None:
    from langchain.agents import create_agent

    def paint(sure: bool, colour: str) -> str:
        """Paints."""
        return "done"

    done = create_agent(chain(), [paint]).invoke({"messages": [("user", "Paint it.")]}, {"recursion_limit": 6})
    need(len(done["messages"]) > 1)


# pydantic-ai


def pydantic(model: str = "chat", **more: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    kinds: Any = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel, "anthropic": AnthropicModel}
    return Agent(kinds[model](MODEL), model_settings={"max_tokens": 120}, retries=0, **more)


for _model in ("chat", "responses", "anthropic"):

    @use("pydantic-ai", f"run, {_model}")
    def _(model: str = _model) -> None:
        need(pydantic(model, instructions="Be brief.").run_sync("What is 2 + 3?").output)

    @use("pydantic-ai", f"output_type (a forced tool), {_model}")
    def _(model: str = _model) -> None:
        need(pydantic(model, output_type=model_type()).run_sync("Paint!").output.colour)


@use("pydantic-ai", "stream")
def _() -> None:
    async def run() -> None:
        async with pydantic().run_stream("What is 2 + 3?") as running:
            need("".join([part async for part in running.stream_text(delta=True)]))

    asyncio.run(run())


@use("pydantic-ai", "NativeOutput")
def _() -> None:
    from pydantic_ai import NativeOutput

    need(pydantic(output_type=NativeOutput(model_type())).run_sync("Paint!").output.colour)


# smolagents


def smol() -> Any:
    from smolagents import OpenAIModel

    return OpenAIModel(MODEL, api_base=URL, api_key=KEY, max_tokens=120)


@use("smolagents", "generate")
def _() -> None:
    need(smol().generate([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]).content)


@use("smolagents", "stream")
def _() -> None:
    stream = smol().generate_stream([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
    need("".join(part.content or "" for part in stream))


for _kind in ("ToolCallingAgent", "CodeAgent"):

    @use("smolagents", _kind)
    def _(kind: str = _kind) -> None:
        import smolagents

        agent = getattr(smolagents, kind)(tools=[], model=smol(), max_steps=1, verbosity_level=0)
        agent.run("What is 2 + 3?")
        # A small model's step may be useless; a refusal by the server is a generation error.
        for step in agent.memory.steps:
            error = getattr(step, "error", None)
            need("Generation" not in type(error).__name__, error)


# litellm


def lite(model: str = f"openai/{MODEL}", **more: Any) -> Any:
    import litellm

    return litellm.completion(**{"model": model, "messages": ASK, "max_tokens": 120} | more)


@use("litellm", "completion")
def _() -> None:
    need(lite().choices[0].message.content)


@use("litellm", "stream")
def _() -> None:
    need("".join(chunk.choices[0].delta.content or "" for chunk in lite(stream=True)))


@use("litellm", "tools required")
def _() -> None:
    painted(lite(tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0].function.arguments)


@use("litellm", "json_schema")
def _() -> None:
    painted(lite(response_format=FORM).choices[0].message.content)


@use("litellm", "responses")
def _() -> None:
    import litellm

    need(litellm.responses(model=f"openai/{MODEL}", input="Hi", max_output_tokens=40).output)


@use("litellm", "anthropic's messages")
def _() -> None:
    need(lite(f"anthropic/{MODEL}", api_base=ROOT).choices[0].message.content)


# anthropic


def claude(**more: Any) -> Any:
    import anthropic

    return anthropic.Anthropic(max_retries=0).messages.create(
        **{"model": MODEL, "messages": ASK, "max_tokens": 120} | more
    )


@use("anthropic", "messages")
def _() -> None:
    need(claude(system="Be brief.").content[0].text)


@use("anthropic", "stream")
def _() -> None:
    import anthropic

    with anthropic.Anthropic().messages.stream(model=MODEL, messages=ASK, max_tokens=40) as stream:
        need("".join(stream.text_stream) and stream.get_final_message().usage.output_tokens)


for _feature, _choice in (("tools any", {"type": "any"}), ("tools named", {"type": "tool", "name": "paint"})):

    @use("anthropic", _feature)
    def _(choice: Any = _choice) -> None:
        blocks = claude(tools=[THEIRS], tool_choice=choice).content
        need(blocks[-1].type == "tool_use", blocks)
        painted(blocks[-1].input)


@use("anthropic", "tools auto, count_tokens")
def _() -> None:
    import anthropic

    need(claude(tools=[THEIRS]).content)
    need(anthropic.Anthropic().messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 5)


# instructor

for _mode in ("TOOLS", "JSON_SCHEMA", "JSON"):

    @use("instructor", _mode)
    def _(mode: str = _mode) -> None:
        import instructor
        import openai

        client = instructor.from_openai(openai.OpenAI(), mode=getattr(instructor.Mode, mode))
        client.chat.completions.create(
            model=MODEL, messages=ASK, response_model=model_type(), max_retries=5, max_tokens=120
        )


@use("instructor", "ANTHROPIC_TOOLS")
def _() -> None:
    import anthropic
    import instructor

    client = instructor.from_anthropic(anthropic.Anthropic())
    client.messages.create(model=MODEL, messages=ASK, response_model=model_type(), max_retries=0, max_tokens=120)


def main() -> None:
    for package, feature, function in USES:
        if ONLY not in package and ONLY not in feature:
            continue
        error = ""
        try:
            function()
        except BaseException as caught:
            if isinstance(caught, KeyboardInterrupt):
                raise
            error = f"{type(caught).__name__}: {' '.join(str(caught).split())[:200]}"
        name = {"pydantic-ai": "pydantic-ai-slim"}.get(package, package)
        result = {"package": package, "version": importlib.metadata.version(name), "feature": feature, "error": error}
        print("\n" + json.dumps(result), flush=True)


main()
