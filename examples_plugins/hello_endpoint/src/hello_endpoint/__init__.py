"""Two routes: ``GET /hello`` greets by itself, ``GET /hello/{name}`` lets the model do it."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces import Endpoint, EndpointContext, ModelRouter, OutputKind, SamplingParams, plugin


class HelloOptions(BaseModel):
    """Options under ``plugins.endpoint.hello``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    greeting: str = Field(default="Hello", description="the first word")
    max_tokens: int = Field(default=48, ge=1, description="longest greeting by the model")


class HelloEndpoint(Endpoint):
    def __init__(self, router: ModelRouter, options: HelloOptions) -> None:
        self._router = router
        self._options = options

    def routes(self) -> APIRouter:
        routes = APIRouter()
        routes.add_api_route("/hello", self.hello, methods=["GET"])
        routes.add_api_route("/hello/{name}", self.greet, methods=["GET"])
        return routes

    async def hello(self) -> dict[str, str]:
        return {"message": f"{self._options.greeting} from {', '.join(self._router.names())}"}

    async def greet(self, name: str) -> dict[str, str]:
        if len(name) > 64:
            raise InvalidRequestError(f"name has {len(name)} characters; at most 64", param="name")
        engine = self._router.resolve(None)  # the only model, or the first one
        prompt = engine.render_chat([{"role": "user", "content": f"Greet {name} in one short sentence."}])
        params = SamplingParams(max_tokens=self._options.max_tokens, output_kind=OutputKind.FINAL_ONLY)
        outputs = [output async for output in engine.generate(prompt, params)]
        return {"message": outputs[-1].outputs[0].text}


@plugin("endpoint", options=HelloOptions)
def create(ctx: EndpointContext, options: HelloOptions) -> HelloEndpoint:
    if ctx.router is None:
        raise ConfigError("the hello endpoint needs a server's router")
    return HelloEndpoint(ctx.router, options)
