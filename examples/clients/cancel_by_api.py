"""Stop a request by its id, and wait for the proof. This works from any process that has the same API key."""

import httpx
from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="my-key")

response = client.chat.completions.with_raw_response.create(
    model="base",
    messages=[{"role": "user", "content": "Tell me a long story."}],
    max_tokens=2000,
    stream=True,
)
request_id = response.headers["x-stopguard-id"]
stream = response.parse()
print("reading", request_id, next(iter(stream)).choices[0].delta.content)

answer = httpx.delete(
    f"http://127.0.0.1:8080/v1/requests/{request_id}?wait=settled&timeout=5",
    headers={"Authorization": "Bearer my-key"},  # only the key that made the request may stop it
    timeout=10,
).json()
print("status", answer["status"], "outcome", answer["stop"]["outcome"], "evidence", answer["stop"]["evidence"])

for chunk in stream:  # the stream gets its end, with a reason
    reason = chunk.choices[0].finish_reason
print("finish_reason", reason)
