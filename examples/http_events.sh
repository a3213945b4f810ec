#!/bin/sh
# Server-sent events with curl: produce three readings, follow the topic until they have arrived.
# sh examples/http_events.sh [HOST:PORT] [TOPIC]
set -eu

base=http://${1:-127.0.0.1:8080}
topic=${2:-house}

for value in 21.5 21.7 21.6; do
    curl --silent --show-error --fail-with-body --max-time 60 --output /dev/null \
        -H 'Content-Type: application/vnd.kafka.json.v2+json' "$base/topics/$topic" \
        -d "{\"records\": [{\"key\": \"kitchen/temp\", \"value\": $value}]}"
done

# Each event's data is a record, and its id the position after it. Without `limit` the stream does not end, and with
# `from=end` (the default) it starts with the next record that is stored.
curl --silent --show-error --fail-with-body --max-time 60 --no-buffer \
    "$base/topics/$topic/stream?from=beginning&limit=3" |
    sed -n 's/^data: .*"key":"\([^"]*\)","value":\([0-9.][0-9.]*\).*/\1 \2/p'
