/* The invariant CRC of RoCEv2, and what is known of the one field of it that a socket does not see. */
#include <stddef.h>
#include <stdint.h>

/* Find a library that makes CRCs; return its name, "" if there is none. */
const char *crc_prepare(void);

/* Continue a CRC-32 (IEEE 802.3, reflected, inverted at both ends) over more bytes; begin with 0. */
uint32_t crc_more(uint32_t crc, const void *data, size_t size);

/* Whether two bytes, `behind` bytes before the end of the message, can make this difference of two CRCs. */
int crc_differs_by_two_bytes(uint32_t difference, uint32_t behind);
