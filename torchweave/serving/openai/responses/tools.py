"""Tools of the Responses API as functions: in namespaces, with one text as input, or hosted by OpenAI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Tag

from torchweave.serving.errors import ApiError
from torchweave.serving.openai.bounds import ModelWithBounds
from torchweave.serving.openai.custom_tools import custom_function
from torchweave.serving.openai.protocol import Body
from torchweave.serving.request_warnings import RequestWarnings

_JOINT = "__"
"""Between a namespace and a function's name, where the name alone is ambiguous."""


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Body):
    """A tool whose input is a text, of any form or (`{"type": "grammar", "syntax": ..., "definition": ...}`) of a grammar's."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class HostedTool(ModelWithBounds):
    """A tool that runs at OpenAI, such as web_search; it is left out."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str


def _kind(value: Any) -> str:
    kind = value.get("type", "function") if isinstance(value, dict) else getattr(value, "type", "function")
    return f"a {kind}" if kind in ("function", "custom", "namespace") else "a hosted tool"


_Callable = Annotated[
    Annotated[FunctionTool, Tag("a function")]
    | Annotated[CustomTool, Tag("a custom")]
    | Annotated[HostedTool, Tag("a hosted tool")]
    | Annotated[HostedTool, Tag("a namespace")],
    Discriminator(_kind),
]


class NamespaceTool(Body):
    """A group of functions, such as those of an MCP server. Calls of them carry its name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: list[_Callable]


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("a function")]
    | Annotated[CustomTool, Tag("a custom")]
    | Annotated[NamespaceTool, Tag("a namespace")]
    | Annotated[HostedTool, Tag("a hosted tool")],
    Discriminator(_kind),
]


@dataclass(frozen=True)
class Origin:
    """The tool that a function stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass
class ResponseTools:
    """The functions that a model sees.

    Attributes:
        functions: as in a chat request.
        origins: the tool of each function, by the function's name.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)

    def origin(self, function: str) -> Origin:
        return self.origins.get(function) or Origin(function)

    def function_name(self, name: Any, namespace: Any = None) -> Any:
        """The function's name of a tool; a name that is not among the tools stays."""
        for function, origin in self.origins.items():
            if origin.name == name and origin.namespace == namespace:
                return function
        return name if namespace is None else f"{namespace}{_JOINT}{name}"


def flatten(tools: Sequence[Any], warnings: RequestWarnings) -> ResponseTools:
    """The functions of tools; hosted ones are left out with a warning.

    Raises:
        ApiError: 400, two tools have the same name.
    """
    flat = [(tool, None) for tool in tools if not isinstance(tool, NamespaceTool)]
    flat += [(each, tool.name) for tool in tools if isinstance(tool, NamespaceTool) for each in tool.tools]
    names = Counter(tool.name for tool, _ in flat if not isinstance(tool, HostedTool))
    result = ResponseTools()
    for tool, namespace in flat:
        if isinstance(tool, HostedTool):
            sentence = f"The tool of type {tool.type[:80]!r} was left out: this server does not run it."
            warnings.add("unsupported_tool", sentence)
            continue
        unique = namespace is None or names[tool.name] == 1
        name = tool.name if unique else f"{namespace}{_JOINT}{tool.name}"
        if name in result.origins:
            raise ApiError(400, f"Two tools have the same name {name[:80]!r}; rename one.", param="tools")
        result.origins[name] = Origin(tool.name, namespace, isinstance(tool, CustomTool))
        fields = (
            custom_function(tool.name, tool.description, tool.format)
            if isinstance(tool, CustomTool)
            else tool.model_dump(exclude={"type"}, exclude_none=True)
        )
        result.functions.append({"type": "function", "function": {**fields, "name": name}})
    return result


def chat_tool_choice(choice: Any, tools: ResponseTools) -> Any:
    """`tool_choice` as in chat requests, which nest the function's name and the allowed tools.

    Raises:
        ApiError: 400, it forces a hosted tool.
    """
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools" and "allowed_tools" not in choice:
        listed = choice.get("tools")
        if isinstance(listed, list):
            listed = [_named(each, tools) for each in listed if _names_function(each)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}
    if _names_function(choice):
        return _named(choice, tools)
    if kind != "allowed_tools" and "function" not in choice:
        sentence = f"tool_choice forces the tool {str(kind)[:80]!r}, which this server does not run; use auto."
        raise ApiError(400, sentence, param="tool_choice")
    return choice


def _names_function(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") in ("function", "custom") and "function" not in choice


def _named(choice: dict[str, Any], tools: ResponseTools) -> dict[str, Any]:
    name = tools.function_name(choice.get("name"), choice.get("namespace"))
    if choice.get("namespace") is None and name not in tools.origins:  # a nested function by its name alone
        name = next((each for each, origin in tools.origins.items() if origin.name == choice.get("name")), name)
    return {"type": "function", "function": {"name": name}}
