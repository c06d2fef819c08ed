"""A file from one sender to many receivers over unreliable multicast: all of it arrives, or it is known.

Everybody is a full member of one group, and every message goes to all of it: answers too, because a unicast
reply does not reach another port of the same host everywhere (K-FABRIC-6). A message is a header (magic
`mcF1`, kind, session) and a body, all in network order; `packets` has the table.

```
sender                                             receiver
HELLO  name, size if known       every 0.1 s  ->
                                              <-   JOIN    id, room, largest message, name
WELCOME id                       joined        ->
DATA   number, piece             a window     ->
ASK    pieces, serial            twice a window ->
                                              <-   REPORT  id, serial, next, room, bitmap
DATA   what a report misses                   ->
END    pieces, bytes, SHA-256    all reported ->
                                              <-   DONE    id, verified | differs | failed, words
CLOSE  all of it, or one receiver, and why    ->
```

- A transfer is a session, a number of the sender. It begins when as many receivers as are wanted have
  joined; later ones are told so (CLOSE) and wait for the next session. Only a receiver that is welcome takes
  pieces.
- Pieces are numbered from 0, each as long as it comes, so that a pipe's bytes do not wait for more.
- At most a window of pieces is under way: what every receiver has room for, and as many copies in all as a
  host queues. A loss halves the window, clean reports open it again.
- ASK has a serial number, which REPORT repeats: a piece is lost only if the report answers an ASK that was
  sent after the piece. It is sent again, to a bound for each receiver and piece.
- `next` says that all pieces before it have come, bit i of the bitmap that piece next+i has, `room` how many
  pieces from next on there is memory for: a receiver whose reader is slow holds the sender back, and is
  given up if it takes less than the smallest window in a minute.
- An ASK without an answer is repeated. A receiver that stays silent, or that has missed one piece too often,
  is given up by name and the others go on; a sender that falls silent ends the receiver.
- A file ends where it ended when it was opened; one that has become shorter fails. A receiver
  stores as many bytes as HELLO has announced, no more and no fewer.
- What has come whole, by its digest, is stored, whatever becomes of its sender.
- The receiver says `verified` when the digest is right and the file is where it belongs.
- However often it is asked, a receiver says one thing once in a turn: a flood of questions costs who asks.
- A receiver takes part in one transfer. It tells the senders of the others, who would wait for it.
- The receiver gives up a sender that announces pieces and does not send them for a minute, or that has
  nothing new for an hour, even if it is not silent.
- What is not of the protocol, malformed, or out of place changes nothing, and is counted by reason.
- A number is bound to the address that its owner sends from. Nobody can speak for an end at another address,
  so that a member that lies costs only itself: others neither wait for it without end nor take its pieces
  for those of their sender. Ends that share an address can lie about each other. There is no
  authentication: who offers a file first is received, whoever that is.

`sender.FileSender` and `receiver.FileReceiver` are the two ends: messages and the time go in, messages come
out, without I/O. Times are seconds of any one clock. `drive` has them on endpoints, `files` reads and writes,
and `together` has all ends in one thread.
"""
