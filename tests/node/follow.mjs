// Follows a run with the `eventsource` package, as a browser would: `node follow.mjs URL`.
// Prints one JSON document a line: {"event": id, "data": …} for each event, {"lost": n} for each
// lost connection, {"end": status} when the client has stopped for good, which a 204 makes it do.
import { EventSource } from 'eventsource'

const say = (document) => process.stdout.write(`${JSON.stringify(document)}\n`)

const source = new EventSource(process.argv[2])
let lost = 0

source.onmessage = (event) => say({ event: event.lastEventId, data: JSON.parse(event.data) })

source.onerror = (error) => {
  if (source.readyState === EventSource.CLOSED) {
    say({ end: error.code ?? null })
    return
  }
  lost += 1
  say({ lost })
}
