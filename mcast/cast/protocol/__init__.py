"""Reliable multicast of objects from one sender to many receivers, by NACKs and parity, without I/O or clock.

The design follows NORM (RFC 5740), its NACK building block (RFC 5401) and the FEC building block (RFC 5052);
the packets are its own. `ObjectSender` in `sender` and `ObjectReceiver` in `receiver` are state machines: a
driver passes packets and times in, and sends what they return (`mcast.cast.io`, or `mcast.testing.transfer`
in virtual time, as `mcast sim cast` does).

An object is cut into segments, and these into blocks of at most `MAX_K` source segments, to which the sender
can add parity segments. Any k segments of a block give its k source segments. All packets go to the group. A
packet is a header (magic `mcC4`, whose last byte is the protocol's version; kind; session) and a body in
network order, as `packets` defines it. Packets of another version are rejected, and counted as such.

```
sender                                                           receivers
OFFER     members, round trip, next object           0.1 s    ->
                                                             <-  JOIN   number, window in blocks, name
ADMIT     index and number of each new member                 ->
DESCRIBE  object, size, segment, k, parity, name              ->
DATA      block, encoding symbol id, bytes           k times  ->
SEAL      lengths and BLAKE3 digests of blocks       a block  ->
                                                             <-  NACK   blocks, segments needed and missing
DATA      parity segments, one for different losses           ->
FLUSH     blocks sent, digest, members to answer              ->
                                                             <-  ACK    state, first missing block
BEHIND    object, members that are too slow                   ->
DONE      object, members that have it                        ->
BYE       to one receiver, or to all                          ->
```

Session and objects
- A session belongs to one sender, and carries any number of objects, one after another, without a new JOIN.
- The number of an end is bound to its address (`number_at`).
- A receiver that joins late takes part from the current block on. It requests earlier blocks when a FLUSH
  announces that the sender is idle. If they are not sent any more, it takes part from the next object on.
- A receiver leaves with an ACK of its state, LEFT or COMPLETE_LEFT, which it repeats until a BYE confirms it.
- An object ends once at each receiver, complete or failed, for the life of the session. If the sender is
  silent for `peer_timeout` seconds, the receiver suspends the session. It remembers the number of the last
  object, one bit for each object of a carousel, and the sender's sequence number. If it hears the sender
  again, it joins again under the same number, receives no object that has ended here, and reports the state
  of the last one. A session is known by its number and nonce; a driver remembers some thousands of them.
- A published object has a version, which rises within the session. The sender may send a version again, as
  an object of another number, to receivers that lack it. A receiver that has it ignores the segments, and
  acknowledges the version if a FLUSH asks. A JOIN says which version the receiver has, because a receiver
  that was given up may join again, under a new number.

Repair
- Losses are reported by NACK. A receiver backs off for a random time that the group's size scales, and is
  suppressed by an equal NACK of another receiver (RFC 5401, section 3.2), but only a few times in a row,
  because that one may be forged. The sender collects NACKs for some round trips, and sends as many parity
  segments as the neediest receiver requests. In a group of at most `SMALL_GROUP` both wait for one round
  trip.
- A NACK repeats the stamp of the sender's last packet that its receiver has received. Repairs sent after that
  stamp are under way, and are not sent again.
- If the parity of a block is used up, or a receiver cannot use parity, source segments are sent again.
- An ACK is sent once for each object and receiver, and after each half window, spread in time. If the group
  is quiet, or small, a FLUSH names the receivers whose ACK is missing.

Flow and rate
- The sender is at most `window` blocks ahead of the first block that a receiver misses, and in a small group
  at most three quarters of the shortest receive queue ahead of what receivers have taken. It sends as fast as
  it can until receivers report losses above `TOLERABLE_LOSS`, also of repairs. The rate then falls below what
  arrived, and rises again while the sender uses it.
- A receiver that does not answer, makes no progress, or requests too many repairs is given up: it is named in
  the sender's report, and gets a DONE or BYE. One that is too slow for a deadline or a quorum (`stragglers`)
  gets a BEHIND as soon as the sender goes on without it, and takes part in the next object.

Integrity
- A block is used if the BLAKE3 digest of the object up to the end of the block is the one in its SEAL, and an
  object is complete if its digest is the one in the last FLUSH. Both ends hash each byte once. In a carousel,
  whose blocks arrive in any order, a SEAL has the digest of the block alone.
- A receiver that was restarted reports in an ACK with state STORED how many blocks an earlier run has stored.
  Blocks that all receivers have stored are skipped: only their SEALs are sent. The receiver verifies each
  stored block with its SEAL, requests missing SEALs, and from the first block that differs on it reports a
  lower number and requests segments. It can join when the first blocks are not sent any more, because the
  sender keeps all SEALs.

Carousel (`carousel`)
- The sender repeats one or more objects with consecutive numbers in cycles, with other parity in each cycle,
  and repeats OFFER, DESCRIBE and FLUSH all the time. It expects no answer.
- A receiver takes part without ADMIT, accepts blocks in any order, and sends neither NACK nor ACK. It has at
  most `partial_objects` incomplete objects and `window` incomplete blocks in all. It gives up after many
  cycles, or invitations, without progress (`MAX_FRUITLESS_CYCLES`, `MAX_FRUITLESS_OFFERS`), and `stall`
  seconds at least.

Security, **without a key**
- An attacker in the group can, from its own address, offer objects, request repairs (up to a budget for each
  receiver), use up indexes of receivers, and slow the sender down as the slowest receiver does.
- An attacker that can send from the address of an end can act as that end: end its session, replace it,
  acknowledge what it does not have, and, as the sender, send other bytes under a matching digest. So the
  digest proves that the bytes are the sender's only if nobody else can send from the sender's address.

Security, **with a key** (`auth`): each packet has a tag that only holders of the key can make, and is
accepted once. Other packets are counted by reason, and change nothing.
- Nothing is encrypted: an attacker without the key can read, drop, delay and flood packets.
- It can replay an OFFER: receivers then try to join, and leave after `peer_timeout` seconds.
- A replayed carousel is accepted, because its receivers send no nonce that the sender could repeat.
- All holders of the key are equal, so each can act as any other. Groups that must not trust each other need
  a key each.

Not handled: encryption, more than one sender in a session, unicast repair, and routers that take part.
"""
