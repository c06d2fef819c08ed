/* CRC-32 by carry-less multiplication where the processor has it, by tables of eight bytes elsewhere.
 *
 * The folding is that of V. Gopal and others, "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
 * Instruction" (Intel, 2009), whose constants for this polynomial stand in its appendix. */
#include "crc.h"

#include <string.h>

enum { POLYNOMIAL = 0xEDB88320, ONE = 0x80000000, KNOWN = 256 };

static uint32_t table[8][256];
static uint8_t place_of_top[256]; /* the index of table[0] whose highest byte is this one */
static uint32_t one_byte_back;	  /* x^-8 */

#if defined(__x86_64__)
#include <immintrin.h>
static int can_multiply;

__attribute__((target("pclmul,sse4.1"))) static uint32_t fold(uint32_t crc, const uint8_t *at, size_t size)
{
	static const uint64_t by_64[2] __attribute__((aligned(16))) = { 0x0154442bd4, 0x01c6e41596 };
	static const uint64_t by_16[2] __attribute__((aligned(16))) = { 0x01751997d0, 0x00ccaa009e };
	static const uint64_t by_8[2] __attribute__((aligned(16))) = { 0x0163cd6124, 0 };
	static const uint64_t barrett[2] __attribute__((aligned(16))) = { 0x01db710641, 0x01f7011641 };
	__m128i k = _mm_load_si128((const __m128i *)by_64), low = _mm_setr_epi32(~0, 0, ~0, 0);
	__m128i lane[4], high;

	for (int i = 0; i < 4; i++)
		lane[i] = _mm_loadu_si128((const __m128i *)at + i);
	lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)crc));
	for (at += 64, size -= 64; size >= 64; at += 64, size -= 64)
		for (int i = 0; i < 4; i++) {
			high = _mm_clmulepi64_si128(lane[i], k, 0x11);
			lane[i] = _mm_xor_si128(_mm_clmulepi64_si128(lane[i], k, 0x00), high);
			lane[i] = _mm_xor_si128(lane[i], _mm_loadu_si128((const __m128i *)at + i));
		}
	k = _mm_load_si128((const __m128i *)by_16);
	for (int i = 1; i < 4; i++) {
		high = _mm_clmulepi64_si128(lane[0], k, 0x11);
		lane[0] = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(lane[0], k, 0x00), high), lane[i]);
	}
	for (; size >= 16; at += 16, size -= 16) {
		high = _mm_clmulepi64_si128(lane[0], k, 0x11);
		lane[0] = _mm_xor_si128(_mm_clmulepi64_si128(lane[0], k, 0x00), high);
		lane[0] = _mm_xor_si128(lane[0], _mm_loadu_si128((const __m128i *)at));
	}
	high = _mm_clmulepi64_si128(lane[0], k, 0x10);
	lane[0] = _mm_xor_si128(_mm_srli_si128(lane[0], 8), high);
	high = _mm_srli_si128(lane[0], 4);
	k = _mm_load_si128((const __m128i *)by_8);
	lane[0] = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(lane[0], low), k, 0x00), high);
	k = _mm_load_si128((const __m128i *)barrett);
	high = _mm_clmulepi64_si128(_mm_and_si128(lane[0], low), k, 0x10);
	high = _mm_clmulepi64_si128(_mm_and_si128(high, low), k, 0x00);
	return (uint32_t)_mm_extract_epi32(_mm_xor_si128(lane[0], high), 1);
}
#endif

static uint32_t product(uint32_t a, uint32_t b)
{
	uint32_t sum = 0;

	for (uint32_t bit = ONE; a; bit >>= 1) {
		if (a & bit) {
			sum ^= b;
			a ^= bit;
		}
		b = b & 1 ? b >> 1 ^ POLYNOMIAL : b >> 1;
	}
	return sum;
}

void crc_prepare(void)
{
	for (uint32_t byte = 0; byte < 256; byte++) {
		uint32_t crc = byte;

		for (int bit = 0; bit < 8; bit++)
			crc = crc & 1 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
		table[0][byte] = crc;
		place_of_top[crc >> 24] = (uint8_t)byte;
	}
	for (uint32_t byte = 0; byte < 256; byte++)
		for (int more = 1; more < 8; more++)
			table[more][byte] = table[more - 1][byte] >> 8 ^ table[0][table[more - 1][byte] & 0xFF];
	one_byte_back = (ONE ^ table[0][place_of_top[ONE >> 24]]) << 8 | place_of_top[ONE >> 24];
#if defined(__x86_64__)
	can_multiply = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif
}

uint32_t crc_more(uint32_t crc, const void *data, size_t size)
{
	const uint8_t *at = data;

#if defined(__x86_64__)
	if (can_multiply && size >= 64) {
		size_t folded = size & ~(size_t)15;

		crc = fold(crc, at, folded);
		at += folded;
		size -= folded;
	}
#endif
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
	for (; size >= 8; at += 8, size -= 8) {
		uint32_t low, high;

		memcpy(&low, at, 4);
		memcpy(&high, at + 4, 4);
		low ^= crc;
		crc = table[7][low & 0xFF] ^ table[6][low >> 8 & 0xFF] ^ table[5][low >> 16 & 0xFF] ^ table[4][low >> 24] ^
		      table[3][high & 0xFF] ^ table[2][high >> 8 & 0xFF] ^ table[1][high >> 16 & 0xFF] ^ table[0][high >> 24];
	}
#endif
	for (; size; size--)
		crc = crc >> 8 ^ table[0][(crc ^ *at++) & 0xFF];
	return crc;
}

/* CRC is linear: two messages that differ in two bytes have CRCs that differ by what these bytes alone make of a register of
 * zeros, run on through the bytes behind them. So run the difference back through all of these: at the two bytes, the register
 * was these bytes themselves, and its upper half 0. */
int crc_differs_by_two_bytes(uint32_t difference, uint32_t behind)
{
	static _Thread_local struct {
		uint32_t bytes, factor;
	} known[KNOWN];
	uint32_t bytes = behind + 2;
	uint32_t place = bytes / 4 % KNOWN;

	if (!difference)
		return 1;
	if (known[place].bytes != bytes) {
		uint32_t factor = ONE, power = one_byte_back;

		for (uint32_t left = bytes; left; left >>= 1) {
			if (left & 1)
				factor = product(factor, power);
			power = product(power, power);
		}
		known[place].bytes = bytes;
		known[place].factor = factor;
	}
	return product(difference, known[place].factor) <= 0xFFFF;
}
