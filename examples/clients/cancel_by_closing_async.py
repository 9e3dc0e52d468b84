"""The same with asyncio, where a stop is usually a cancelled task or a timeout. It works without a stream too."""

import asyncio

from openai import AsyncOpenAI


async def main() -> None:
    async with AsyncOpenAI(base_url="http://127.0.0.1:8080/v1", api_key="my-key") as client:
        question = client.chat.completions.create(
            model="base",
            messages=[{"role": "user", "content": "Tell me a long story."}],
            max_tokens=2000,
        )
        try:
            answer = await asyncio.wait_for(question, timeout=1.0)
            print(answer.choices[0].message.content)
        except TimeoutError:
            print("gave up, and the engine stopped")  # the cancelled call has closed its connection


asyncio.run(main())
