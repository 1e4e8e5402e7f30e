/* program_tables.h - which values of a program may be looked up instead of computed.
 *
 * GELU takes some thirty instructions an element, its gradient sixty: more time than memory takes. But an input of
 * bfloat16 has few values, so where there are many elements a backend computes what is dear for each of them once, and
 * looks it up. The bits are the same.
 */
#ifndef TE_KERNELS_PROGRAM_TABLES_H
#define TE_KERNELS_PROGRAM_TABLES_H

#include "program.h"

enum { TE_TABLES_INSNS = 96 }; /* longer programs have none */

typedef struct te_program_table {
    int value, input; /* the value, and the slot of the input that it is a function of */
} te_program_table;

/* The values to look up, at most `most` of them, from first to last: each takes a dear operation on one of the inputs
 * that are `narrow`, and what is the same everywhere, and the rest of the program is made from it directly; outputs
 * count where they are `wanted`. Returns how many. */
int te_program_tables(const te_program *program, const bool *narrow, const bool *wanted, te_program_table *tables,
                      int most);

/* Whether an elementary function or its like, of many instructions. */
bool te_opcode_is_dear(int op);

#endif
