/* The invariant CRC of RoCEv2, and what is known of the one field of it that a socket does not see. */
#include <stddef.h>
#include <stdint.h>

enum { CRC_BEGIN = 0xFFFFFFFF };

void crc_prepare(void);

/* Continue a CRC-32 (IEEE 802.3, reflected) over more bytes; begin with CRC_BEGIN, and end by inverting. */
uint32_t crc_more(uint32_t crc, const void *data, size_t size);

/* Whether two bytes, `behind` bytes before the end of the message, can make this difference of two CRCs. */
int crc_differs_by_two_bytes(uint32_t difference, uint32_t behind);
