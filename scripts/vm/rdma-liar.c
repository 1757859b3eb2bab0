/*
 * A network between two Ethernet ports that makes late answers of the answers to RDMA READs (RoCE v2). It loses, delays and reorders packets, as any
 * network may, and makes or changes none. Runs in the guest, for rdma-liar.sh.
 *
 * usage: rdma-liar PORT0 PORT1 ONE_IN SEED      PORT0 is the server's side. One in so many answers is lost. Ends on SIGTERM.
 *
 * From then on everything else for that queue pair is kept. When the RNIC has executed the READ once more, its new answer passes, and behind it the
 * old ones. The requester takes these for answers of the second execution: only packet numbers tell them apart (IBTA volume 1, 9.7).
 *
 * One line at the end, for the script: how many answers were seen and lost, sent again, late, given up.
 */
#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* Offsets in a frame of Ethernet, IPv4 without options, UDP, and the base transport header (BTH: IBTA volume 1, 9.2). */
#define IP_PROTOCOL 23
#define UDP_PORT 36
#define BTH 42
#define BTH_LEN 12
#define ROCE_PORT 4791
/* A READ's answer of one packet: a page, or a proof. */
#define READ_RESPONSE_ONLY 0x10

/* Bounds: queue pairs with a lost answer at a time (others lose none), and packets that are kept for each (more are lost). */
#define LIES 64
#define KEPT 256
/* After this the queue pair has given up: seven sendings, 0.54 s apart. */
#define PATIENCE_S 6.0
#define FRAME_LEN 9000

struct packet {
	size_t len;
	unsigned char *bytes;
};

struct lie {
	int is_on;
	uint32_t queue_pair, number;
	double since;
	unsigned kept;
	struct packet packets[KEPT];
};

static struct lie lies[LIES];
static unsigned long seen, lost, again, late, given_up;
static volatile sig_atomic_t is_over;

static void need(int holds, const char *what)
{
	if (!holds) {
		perror(what);
		exit(1);
	}
}

static void end(int signal)
{
	(void)signal;
	is_over = 1;
}

static double now_s(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

/* A socket for all that arrives at a port, and for what is to leave by it. */
static int open_port(const char *name)
{
	struct sockaddr_ll address = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = (int)if_nametoindex(name) };
	struct packet_mreq all = { .mr_ifindex = address.sll_ifindex, .mr_type = PACKET_MR_PROMISC };
	int port = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL)), bytes = 8 << 20, yes = 1;

	need(port >= 0 && address.sll_ifindex > 0 && !bind(port, (struct sockaddr *)&address, sizeof(address)), name);
	need(!setsockopt(port, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof(all)), "promiscuous");
	need(!setsockopt(port, SOL_PACKET, PACKET_IGNORE_OUTGOING, &yes, sizeof(yes)), "what arrives only");
	need(!setsockopt(port, SOL_SOCKET, SO_RCVBUFFORCE, &bytes, sizeof(bytes)), "a large buffer");
	return port;
}

static void pass(int port, const unsigned char *bytes, size_t len)
{
	for (int attempt = 0; attempt < 50; attempt++) {
		if (send(port, bytes, len, 0) == (ssize_t)len)
			return;
		usleep(200); /* The queue is full. */
	}
}

/* Ends a lie; what was kept leaves by the port, or is lost without one. */
static void finish(struct lie *lie, int port)
{
	for (unsigned at = 0; at < lie->kept; at++) {
		if (port >= 0)
			pass(port, lie->packets[at].bytes, lie->packets[at].len);
		free(lie->packets[at].bytes);
	}
	lie->is_on = 0;
}

static void keep(struct lie *lie, const unsigned char *bytes, size_t len)
{
	struct packet *packet = &lie->packets[lie->kept];

	if (lie->kept == KEPT)
		return;
	packet->bytes = malloc(len);
	need(packet->bytes != NULL, "memory");
	memcpy(packet->bytes, bytes, len);
	packet->len = len;
	lie->kept++;
}

static uint32_t three_bytes(const unsigned char *at)
{
	return (uint32_t)at[0] << 16 | (uint32_t)at[1] << 8 | at[2];
}

/* A packet of the server's: whether it passes. */
static int passes(const unsigned char *frame, size_t len, int one_in, int port)
{
	const unsigned char *bth = frame + BTH;
	struct lie *of_this = NULL, *room = NULL;
	uint32_t queue_pair, number;
	int is_answer;

	if (len < BTH + BTH_LEN || frame[12] != 8 || frame[13] != 0 || frame[IP_PROTOCOL] != 17 ||
	    (frame[UDP_PORT] << 8 | frame[UDP_PORT + 1]) != ROCE_PORT)
		return 1;
	queue_pair = three_bytes(bth + 5);
	number = three_bytes(bth + 9);
	is_answer = bth[0] == READ_RESPONSE_ONLY;
	for (struct lie *lie = lies; lie < lies + LIES; lie++) {
		if (lie->is_on && lie->queue_pair == queue_pair)
			of_this = lie;
		else if (!lie->is_on)
			room = lie;
	}
	if (of_this && is_answer && number == of_this->number) {
		pass(port, frame, len);
		again++;
		late += of_this->kept;
		finish(of_this, port);
		return 0;
	}
	if (of_this) {
		keep(of_this, frame, len);
		return 0;
	}
	if (!is_answer)
		return 1;
	seen++;
	if (!room || rand() % one_in != 0)
		return 1;
	*room = (struct lie){ .is_on = 1, .queue_pair = queue_pair, .number = number, .since = now_s() };
	lost++;
	return 0;
}

int main(int count, char **arguments)
{
	static unsigned char frame[FRAME_LEN];
	struct sigaction ends = { .sa_handler = end };
	int ports[2], one_in;

	if (count != 5) {
		fprintf(stderr, "usage: %s PORT0 PORT1 ONE_IN SEED\n", arguments[0]);
		return 2;
	}
	one_in = atoi(arguments[3]);
	need(one_in > 0, "ONE_IN");
	srand((unsigned)atoi(arguments[4]));
	for (int side = 0; side < 2; side++)
		ports[side] = open_port(arguments[1 + side]);
	/* Without SA_RESTART, so that a wait ends. */
	sigaction(SIGTERM, &ends, NULL);
	while (!is_over) {
		struct pollfd arrived[2] = { { .fd = ports[0], .events = POLLIN }, { .fd = ports[1], .events = POLLIN } };

		poll(arrived, 2, 200);
		for (struct lie *lie = lies; lie < lies + LIES; lie++) {
			if (lie->is_on && now_s() - lie->since > PATIENCE_S) {
				finish(lie, -1);
				given_up++;
			}
		}
		for (int side = 0; side < 2; side++) {
			int other = ports[!side];
			ssize_t len;

			if (!(arrived[side].revents & POLLIN))
				continue;
			len = recv(ports[side], frame, sizeof(frame), MSG_DONTWAIT);
			if (len > 0 && (side == 1 || passes(frame, (size_t)len, one_in, other)))
				pass(other, frame, (size_t)len);
		}
	}
	printf("seen %lu lost %lu again %lu late %lu given_up %lu\n", seen, lost, again, late, given_up);
	return 0;
}
