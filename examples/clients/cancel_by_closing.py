"""Stop a stream by leaving it: the connection closes, and the work in the engine ends."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="my-key")

with client.chat.completions.create(
    model="base",
    messages=[{"role": "user", "content": "Tell me a long story."}],
    max_tokens=2000,
    stream=True,
) as stream:
    for number, chunk in enumerate(stream):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
        if number == 20:
            break  # leaving the `with` closes the connection: that is the stop
print("\nleft the stream")
