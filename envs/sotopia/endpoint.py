"""Chat endpoints for SOTOPIA's partners and judges.

    endpoint = Endpoint("http://localhost:8000/v1", "name of the model", key="SOTOPIA_JUDGE_KEY")
    text = await endpoint.ask([{"role": "user", "content": "Hello"}])

Any OpenAI-compatible endpoint will do. A request that times out, breaks off, or is answered by 408,
409, 429, 5xx or by something unreadable is sent again after a pause that doubles, at most
`in_flight` at a time. Anything else fails at once.
"""

import asyncio
import os
import random
import re
import zlib
from collections import Counter
from urllib.parse import urlsplit

AGAIN = (408, 409, 429)  # and 5xx: worth another try
LONGEST_PAUSE = 30.0  # seconds between two tries
LARGEST_BODY = 2**20  # bytes of a response, unpacked
SENT = (  # headers of a request; what the environment adds for OpenAI is for OpenAI's own address
    "host authorization content-type content-length accept accept-encoding user-agent connection"
).split()


class EndpointError(Exception):
    """An endpoint gave no usable answer.

    `reason` is one word: timeout, connection, oversize, malformed, or the HTTP status.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def check_url(flag: str, url: str, model: str) -> None:
    """Raise ValueError where an endpoint cannot be used, or where its address holds a secret.

    The address goes into args.json, and is in no message.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        parts.hostname.encode("idna")
    except (ValueError, AttributeError):  # a port or an address that is none
        usable = False
    if not usable or not url.isprintable() or re.search(r"[\s\\]", url):
        raise ValueError(f"--{flag}-url: no http address, as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment or set("@?#") & set(url):
        refused = "no user, password, query or fragment in the address"
        raise ValueError(f"--{flag}-url: keys come from the environment, {refused}")
    if not model:
        raise ValueError(f"--{flag}-model: missing")


def read_key(name: str, url: str) -> str:
    """The key from the environment variable of that name.

    OPENAI_API_KEY goes to OpenAI's own address alone.
    """
    own = None
    if urlsplit(url).hostname == "api.openai.com":
        own = os.environ.get("OPENAI_API_KEY")
    return os.environ.get(name) or own or "none"


class OversizeError(Exception):
    """A response is larger than LARGEST_BODY."""


def only_needed(key: str, url: str):
    """A hook on requests: no header leaves but those in SENT, and no key but this one."""

    async def hook(request) -> None:
        if urlsplit(url).hostname == "api.openai.com":
            return
        for name in [name for name in request.headers if name.lower() not in SENT]:
            del request.headers[name]
        if "authorization" in request.headers:
            request.headers["authorization"] = f"Bearer {key}"

    return hook


async def capped(response) -> None:
    """A hook on responses, before their body is read: it is unpacked here, piece by piece, and
    never beyond LARGEST_BODY."""
    import httpx2

    packing = response.headers.pop("content-encoding", "identity").strip().lower()
    if packing not in ("identity", "gzip", "deflate"):
        raise OversizeError(f"packed as {packing!r}, which was not asked for")
    raw = response.stream
    unpack = zlib.decompressobj(wbits=47) if packing != "identity" else None

    class Body(httpx2.AsyncByteStream):
        async def __aiter__(self):
            size = 0
            async for piece in raw:
                if unpack:
                    try:
                        piece = unpack.decompress(piece, LARGEST_BODY + 1)
                    except zlib.error as error:
                        raise OversizeError("a body that cannot be unpacked") from error
                size += len(piece)
                if size > LARGEST_BODY:
                    raise OversizeError(f"more than {LARGEST_BODY:,} bytes")
                yield piece

        async def aclose(self):
            await raw.aclose()

    response.stream = Body()


def text_of(completion) -> str:
    """The model's text in a response, as UTF-8 can say it. Raises ValueError for another shape."""
    try:
        text = completion.choices[0].message.content or ""
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError("not a chat completion") from error
    if not isinstance(text, str):
        raise ValueError("an answer that is no text")
    return readable(text)


def readable(text: str) -> str:
    """Text without halves of surrogate pairs, which no tokenizer and no connection takes."""
    return text.encode("utf-8", "replace").decode()


class Endpoint:
    """A model behind an OpenAI-compatible address.

    key: the environment variable that holds the key. timeout: of one try [s]. tries: of one
    request. pause: before the second try [s]. `counts` has asked, answered, retries, and the reason
    of each failed try. A connection serves one request, as each rollout has an event loop of its
    own: one that stays open would be left to the garbage collector.
    """

    def __init__(self, url, model, key, in_flight=64, timeout=120.0, tries=5, pause=1.0):
        import openai  # imported late: the scripted default does without

        self.openai = openai
        self.model = model
        self.url = url
        self.timeout = timeout
        self.tries = tries
        self.pause = pause
        self.in_flight = in_flight

        # our own retries: they are counted, and they cover answers that cannot be read
        key = read_key(key, url)
        self.hooks = {"request": [only_needed(key, url)], "response": [capped]}
        self.client = openai.AsyncOpenAI(
            base_url=url,
            api_key=key,
            max_retries=0,
            timeout=timeout,
            http_client=self.connections(),
        )
        self.loop = self.free = None
        self.counts = Counter()
        self.random = random.Random()  # waits draw nothing from the run's numbers

    def connections(self):
        import httpx2

        headers = {"accept-encoding": "gzip, deflate"}
        limits = httpx2.Limits(max_keepalive_connections=0)
        return self.openai.DefaultAsyncHttpxClient(
            event_hooks=self.hooks, headers=headers, limits=limits
        )

    def enter_loop(self) -> None:
        """Use connections and a semaphore of the event loop that runs now."""
        loop = asyncio.get_running_loop()
        if self.loop is not loop:
            self.loop = loop
            self.free = asyncio.Semaphore(self.in_flight)
            self.client = self.client.with_options(http_client=self.connections())

    async def ask(self, messages: list[dict], parse=str, **settings):
        """parse(text of the answer), where parse raises ValueError for what it cannot read.

        Raises EndpointError.
        """
        self.enter_loop()
        self.counts["asked"] += 1
        messages = [message | {"content": readable(message["content"])} for message in messages]
        for attempt in range(self.tries):
            try:
                async with self.free:
                    # the client's own timeout is per read: a slow drip outlives it
                    async with asyncio.timeout(self.timeout):
                        answer = await self.client.chat.completions.create(
                            model=self.model, messages=messages, **settings
                        )
                parsed = parse(text_of(answer))
                self.counts["answered"] += 1
                return parsed
            except (TimeoutError, self.openai.APITimeoutError):
                reason, wait = "timeout", None
            except self.openai.APIStatusError as error:
                # the status and nothing else: bodies of such answers may repeat the key
                reason, wait = str(error.status_code), error.response.headers.get("retry-after")
            except self.openai.APIConnectionError as error:
                oversize = isinstance(error.__cause__, OversizeError)
                reason, wait = "oversize" if oversize else "connection", None
            except OversizeError:
                reason, wait = "oversize", None
            except (ValueError, RecursionError, self.openai.OpenAIError):
                # the verdict, or the whole answer, is not what it should be
                reason, wait = "malformed", None

            self.counts[reason] += 1
            final = reason.isdigit() and int(reason) < 500 and int(reason) not in AGAIN
            if final or attempt + 1 == self.tries:
                raise EndpointError(reason)
            self.counts["retries"] += 1
            await asyncio.sleep(self.backoff(attempt, wait))

    def backoff(self, attempt: int, wait: str | None) -> float:
        """Seconds until the next try.

        They double, and are a little longer at random, so that a batch does not come back as one
        wave. What the endpoint asks for (Retry-After) counts where it is more.
        """
        seconds = self.pause * 2**attempt * self.random.uniform(1.0, 1.5)
        asked = float(wait) if re.fullmatch(r"\d{1,6}(\.\d+)?", wait or "") else 0.0
        return min(LONGEST_PAUSE, max(seconds, asked))
