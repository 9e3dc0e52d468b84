#!/bin/sh
# Stop a stream by leaving it: curl closes its connection after a second (or when Ctrl-C ends it).
curl --silent --no-buffer --max-time 1 http://127.0.0.1:8080/v1/chat/completions \
  --header 'Authorization: Bearer my-key' \
  --header 'Content-Type: application/json' \
  --data '{"model": "base", "stream": true, "max_tokens": 2000,
           "messages": [{"role": "user", "content": "Tell me a long story."}]}'
test $? -eq 28 && echo 'left the stream'
