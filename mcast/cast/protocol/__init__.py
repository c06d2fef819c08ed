"""Objects from one sender to many receivers: only what is missing is said, and parity repairs it.

This is the protocol, without I/O and clock. `mcast sim cast` plays it.

An object is cut into pieces, and the pieces into blocks of at most `MAX_K`. All messages go to the
group. A message is a header (`mcC2`, of which the last byte is the protocol's version, kind, session)
and a body in network order; `messages` has the table. Messages of other versions are refused, and counted as
such.

```
sender                                                  receivers
OFFER    members, round trip, next object    0.1 s  ->
                                                    <-  ENTER   number, room in blocks, name
ADMIT    index and number of each that enters       ->
DESCRIBE object, size, piece, width, spare, name    ->
PIECE    block, index, bytes             a block    ->
SEAL     pieces, bytes, BLAKE3 of the last blocks   ->
                                                    <-  LACK    blocks, how many pieces, which
PIECE    parity, one for different losses           ->
FLUSH    blocks sent, BLAKE3 of all, who answers    ->
                                                    <-  HAVE    all blocks before; all; failed; left; on disk
BEHIND   object, who is too slow for the strategy   ->
OVER     object, who has it whole                   ->
BYE      to one receiver, or to everybody           ->
```

- A session is one sender's, and takes any number of objects, one after another, without a new handshake.
- A receiver speaks when it lacks something. It waits a random time, which the group's size scales, and is
  silent if another receiver has asked for as much (RFC 5401, section 3.2), but not for ever: whom it hears
  may be a stranger. The sender takes all requests of some round trips together, and sends as many parity
  pieces as the receiver needs that lacks most. In a group of at most `FEW`, whose requests cost little, both
  wait for one round trip.
- A request repeats the stamp of the last message of the sender that its receiver has heard. What was sent
  after that stamp is on its way, and is not sent again.
- Where parity is used up, or a receiver cannot use parity, the pieces that are named are sent again.
- HAVE comes once from each receiver and object, and once for each half of the window, spread in time. When
  the group is quiet, or has at most `FEW`, a FLUSH names the receivers whose HAVE is missing.
- The sender sends at most `room` blocks beyond the first that some receiver lacks, and in a group of at most
  `FEW` no more than three quarters of each receiver's `queue` hold: that is the window. It sends as fast as
  it can until the receivers report losses above `TOLERATED`, of repairs too, and then no faster than what
  arrived. The pace rises again while the sender uses it.
- A block is used when the BLAKE3 digest of the object up to its end is that of its SEAL, and the object is
  whole when that of all its bytes is what the last FLUSH says. Both ends take in each byte once. Of what goes
  round and round, whose blocks come in any order, a SEAL has the digests of the blocks alone.
- A receiver that comes late takes part from the current block, and asks for the beginning at the next FLUSH
  that says that the sender waits. If the beginning is gone, it takes part from the next object.
- A receiver that was killed says in a HAVE up to which block its disk seems to have the object. Blocks that
  all have by their own word are not sent: the sender says their SEALs alone. The receiver compares each block
  on its disk with its SEAL before the block counts, asks for SEALs that it lacks, and takes back its word,
  and asks for the pieces, from the first block on that differs. It may come back when the beginning is gone,
  because all SEALs are kept.
- A receiver that leaves says so by HAVE, until a BYE confirms it, and in it whether the object is whole.
- What has ended at a receiver, whole or missed, has ended there for the life of the sender's session. When
  the sender was silent for `peer_timeout` seconds, the receiver leaves the session, but keeps the number of
  the last object, of objects that go round together one bit each, and the count of the sender's messages. If
  it hears the sender again, it enters anew under the same number, takes none of these a second time, and says
  of the last one what has become of it. A session is known by its number and nonce, and a driver remembers
  some thousand of them.
- A receiver that is left behind, by the strategy or because it is silent, stands still or asks for too much,
  is named in the sender's report, and learns it by OVER or BYE. One that is too slow for a deadline or a
  quorum (`stragglers`) learns it by BEHIND as soon as the sender goes on without it, takes part in the next
  object, and hears BEHIND again if it still asks for this one.
- An object may go round and round (`carousel`), which its DESCRIBE says. Its sender says OFFER, DESCRIBE and
  FLUSH again and again, and needs no answer. A receiver takes part without an ADMIT, takes blocks in any
  order, and says nothing. It gives up when it has heard `ROUNDS` times the object's pieces, or `INVITED`
  invitations and no piece, without one block more, and for `stall` seconds at least.
- Several objects may go round together (`circle`), each in its turn, with numbers that follow one another:
  each DESCRIBE says how many they are, and which of them this is. A receiver keeps of up to `TOGETHER` of
  them what is there in part, `room` blocks in all. It gives up what is never described when it has heard
  `ROUNDS` times as many turns as there are objects, without news.
- The number of an end is bound to its address, as in `mcast/cast/protocol/packets.py`.
- With a key the group is closed (`closed`): each message has a tag that only holders of the key can write,
  and counts once. Messages of others are counted by reason, and change nothing.

What an enemy in the group can do **without a key**: at an address of its own it can offer objects of its
own, ask for repairs (each receiver has a bound), take places, and slow a sender down as the slowest receiver
does. Who can send from the address of an end can speak as that end: end its session, take its place, say that
it has what it has not, and, as the sender, offer other bytes under a digest of its own. So the digest shows
what the sender sent only where nobody else can send from the sender's address.

**With a key** an enemy that does not have the key can hear all, because nothing is encrypted. The enemy can
drop, delay and flood messages, and say an invitation again that it has recorded: a receiver then asks in
vain, and leaves that session after `peer_timeout` seconds. A recorded carousel that is said again is taken
for one of now, because its receivers draw no nonce that comes back. An enemy that has the key is a member:
the key is one for all, so any member can speak as any other. Groups that must not trust each other need a key
each.
"""
