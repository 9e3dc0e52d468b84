#!/bin/sh
# Stop a request by a name of your own (X-Request-Id), and wait for the proof.
curl --silent --no-buffer http://127.0.0.1:8080/v1/chat/completions \
  --header 'Authorization: Bearer my-key' \
  --header 'Content-Type: application/json' \
  --header 'X-Request-Id: story-1' \
  --data '{"model": "base", "stream": true, "max_tokens": 2000,
           "messages": [{"role": "user", "content": "Tell me a long story."}]}' > story.txt &

# Once it has begun:
until grep --quiet --no-messages data: story.txt; do sleep 0.1; done

curl --silent --request DELETE 'http://127.0.0.1:8080/v1/requests/story-1?wait=settled&timeout=5' \
  --header 'Authorization: Bearer my-key'
echo
wait
tail -n 4 story.txt # the last event says why it ended; then comes data: [DONE]
