/*
 * Preloaded into OpenSM, makes an SM of before send-only full members: that bit of a JoinState means nothing to this
 * SM, and ClassPortInfo does not announce it. A request for that bit alone is then one for none, which is refused.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

#define CLASS 1
#define METHOD 3
#define ATTRIBUTE 17		/* its lower byte; that of both attributes is less than 256 */
#define DATA 56
#define SA_CLASS 0x03
#define RESPONSE 0x80
#define CLASS_PORT_INFO 0x01
#define MC_MEMBER_RECORD 0x38
#define JOIN_STATE (DATA + 48)
#define SEND_ONLY_FULL 0x08
#define CAPABILITY_MASK2 (DATA + 5)	/* its bits 11 to 18, in front of 5 bits of the response time */
#define KNOWS_SEND_ONLY 0x02		/* bit 12 */

size_t umad_size(void);

int umad_recv(int port, void *umad, int *length, int timeout_ms)
{
	static int (*next)(int, void *, int *, int);
	unsigned char *mad = (unsigned char *)umad + umad_size();
	int agent;

	if (!next)
		next = dlsym(RTLD_NEXT, "umad_recv");
	agent = next(port, umad, length, timeout_ms);
	if (agent >= 0 && mad[CLASS] == SA_CLASS && !(mad[METHOD] & RESPONSE) && mad[ATTRIBUTE] == MC_MEMBER_RECORD)
		mad[JOIN_STATE] &= ~SEND_ONLY_FULL;
	return agent;
}

int umad_send(int port, int agent, void *umad, int length, int timeout_ms, int retries)
{
	static int (*next)(int, int, void *, int, int, int);
	unsigned char *mad = (unsigned char *)umad + umad_size();

	if (!next)
		next = dlsym(RTLD_NEXT, "umad_send");
	if (mad[CLASS] == SA_CLASS && mad[METHOD] & RESPONSE && mad[ATTRIBUTE] == CLASS_PORT_INFO)
		mad[CAPABILITY_MASK2] &= ~KNOWS_SEND_ONLY;
	return next(port, agent, umad, length, timeout_ms, retries);
}
