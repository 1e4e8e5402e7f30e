/* program_chain.h - runs of operations whose results pass from one to the next in vector registers.
 *
 * Run block by block, an operation reads its arguments from L1 and writes its result there, which costs more than most
 * operations themselves. So neighbouring operations of a plan form a chain: a list of links that is walked once per
 * *strip*, four vectors of elements. Each link is a short function that finds the result of the one before, acc, in
 * vector registers, leaves its own there and calls the next one as the last thing it does, which compilers turn into a
 * jump. What is needed later than by the next link is written to its slot by a KEEP.
 *
 *      m2 = m * beta1 + g * fresh                  acc = g * fresh
 *      p2 = p - m2 * rate / (sqrt(v2) + eps)       acc = m * beta1 + acc        a pair; both operations round
 *                                                  KEEP m2
 *                                                  acc = acc * rate …
 *
 * COLUMNS adds acc to the sums of columns and passes it on, so that what is summed need not be kept and read again.
 * Reductions of rows are no links: their lanes would go through memory from strip to strip, which takes longer than
 * reading the row once more.
 *
 * A link says where each argument is: acc, a block of elements, or one number. There is a function for every operation
 * and every such combination, so a chain decides nothing while it runs. Tensors of bfloat16 need not be loaded first:
 * the block is the tensor itself (HALF). Likewise a KEEP may round acc to a tensor of bfloat16. Elements behind the
 * last whole strip of a tile are done by the operations' block functions; the bits are the same.
 *
 * Binding links to a tile takes as long as some hundred elements. Where a chain is all there is to a program, and all
 * that it loads and stores are tensors, one tile is a whole chunk: the chain goes over it in *windows*, in which
 * tensors go on and registers, only used between its links, begin anew.
 */
#ifndef TE_KERNELS_CPU_PROGRAM_CHAIN_H
#define TE_KERNELS_CPU_PROGRAM_CHAIN_H

#include "program_blocks.h"

typedef enum te_link_from { TE_FROM_ACC, TE_FROM_BLOCK, TE_FROM_NUMBER, TE_FROM_HALF, TE_FROM_COUNT } te_link_from;

/* In the order of its steps; arguments are slots, so one chain serves all runs of a plan. Which function a link is
 * becomes known when it runs, with the types of the tensors. */
typedef struct te_link {
    uint8_t op;     /* te_opcode or te_block_pair, or TE_LINK_KEEP and those behind it */
    uint8_t number; /* bit i: argument i is a number */
    int32_t arg[3]; /* slots, -1: acc or none; KEEP: the first is where acc goes, sums: the last is where they are */
} te_link;

/* What a slot's memory is while a chain runs, unless it is just values: a tensor of bfloat16; an output
 * too large for the caches, written past them, which saves reading its lines first; any tensor, so that it
 * goes on behind the tile. */
typedef enum te_slot_form {
    TE_FORM_HALF = 1,
    TE_FORM_STREAM = 2,
    TE_FORM_TENSOR = 4,
    TE_FORM_CHAINED = TE_FORM_HALF | TE_FORM_STREAM /* what links can handle and block functions cannot */
} te_slot_form;

enum {
    TE_LINK_KEEP = TE_BLOCK_OPS,
    TE_LINK_COLUMNS,
    TE_LINK_COLUMNS_DOT, /* the product of two */
    TE_LINK_END,
    TE_LINK_WAYS = TE_FROM_COUNT * TE_FROM_COUNT * TE_FROM_COUNT, /* of taking three arguments */
    TE_LINK_COUNT = TE_BLOCK_OPS * TE_LINK_WAYS, /* TE_BLOCK_LOOK_UP takes a number that is a table */
    TE_CHAIN_MAX = 48 /* links of a chain */
};

/* The function of an operation; arguments that it does not have count as acc. */
#define TE_LINK_OF(op, a, b, c) ((op) * TE_LINK_WAYS + ((c) * TE_FROM_COUNT + (b)) * TE_FROM_COUNT + (a))

/* Whether an operation may have blocks of bfloat16 for arguments: those of two do, and pairs,
 * which become two links. */
static inline bool te_link_takes_halves(int op) { return op != TE_PW_WHERE; }

#endif
