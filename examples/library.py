"""No server: the engine in your own program, many requests at once."""

import asyncio

import runtime


async def main() -> None:
    """Streams one answer while two others are made."""
    async with runtime.Engine() as engine:  # Engine(model_path="DIR") for a model of yours
        others = asyncio.gather(
            engine.generate("Once upon a time", max_new_tokens=20, seed=1),
            engine.generate([{"role": "user", "content": "Say hello."}], max_new_tokens=20),
        )
        async for delta in engine.stream(
            [{"role": "user", "content": "Count from 1 to 5."}], temperature=0, max_new_tokens=40
        ):
            print(delta.text, end="", flush=True)
        print()
        for answer in await others:
            print("-", " ".join(answer.text.split()))


if __name__ == "__main__":  # ranks are processes of their own and import this file
    asyncio.run(main())
