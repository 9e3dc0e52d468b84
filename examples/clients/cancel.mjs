// Stop a stream by leaving it: an AbortController closes the connection. Node 18 or newer, or a browser.
const controller = new AbortController();
const response = await fetch("http://127.0.0.1:8080/v1/chat/completions", {
  method: "POST",
  headers: { Authorization: "Bearer my-key", "Content-Type": "application/json" },
  body: JSON.stringify({
    model: "base",
    stream: true,
    max_tokens: 2000,
    messages: [{ role: "user", content: "Tell me a long story." }],
  }),
  signal: controller.signal,
});
const id = response.headers.get("x-stopguard-id");

let pieces = 0;
try {
  for await (const piece of response.body) {
    pieces += 1;
    if (pieces === 5) controller.abort(); // that is the stop
  }
} catch (error) {
  if (error.name !== "AbortError") throw error;
}

// What became of it (the same key may ask):
const state = await fetch(`http://127.0.0.1:8080/v1/requests/${id}`, { headers: { Authorization: "Bearer my-key" } });
console.log("left the stream;", (await state.json()).stop);
