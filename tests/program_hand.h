/* program_hand.h - row programs written instruction by instruction, and the devices to run them on. */
#ifndef TE_TEST_PROGRAM_HAND_H
#define TE_TEST_PROGRAM_HAND_H

#include "kernels/cpu/cpu.h"
#include "test.h"

enum { MAX_INSNS = 128, MAX_SLOTS = 8 };

typedef struct built {
    te_program        program;
    te_insn           insns[MAX_INSNS];
    struct te_program_output outputs[MAX_SLOTS];
    uint8_t           input_rates[MAX_SLOTS];
} built;

static inline void begin(built *b, const char *name)
{
    memset(b, 0, sizeof *b);
    snprintf(b->program.name, sizeof b->program.name, "%s", name);
    b->program.mem = &te_mem_libc;
    b->program.insns = b->insns;
    b->program.outputs = b->outputs;
    b->program.input_rates = b->input_rates;
}

static inline int emit_full(built *b, te_opcode op, int rate, int slot, double imm, int a0, int a1, int a2)
{
    te_insn insn = {.op = (uint8_t)op, .slot = (int16_t)slot, .arg = {a0, a1, a2}, .imm = imm};
    for (int k = te_opcode_args(op); k < 3; k++) insn.arg[k] = -1; /* of a random program */
    if (rate < 0) {
        rate = TE_RATE_UNIFORM;
        for (int k = 0; k < te_opcode_args(op); k++)
            if (b->insns[insn.arg[k]].rate > rate) rate = b->insns[insn.arg[k]].rate;
    }
    insn.rate = (uint8_t)rate;
    b->insns[b->program.n_insns] = insn;
    return b->program.n_insns++;
}

static inline int emit(built *b, te_opcode op, int a0, int a1, int a2)
{
    return emit_full(b, op, -1, 0, 0, a0, a1, a2);
}
static inline int number(built *b, double value)
{
    return emit_full(b, TE_PW_CONST, TE_RATE_UNIFORM, 0, value, -1, -1, -1);
}
static inline int reduce(built *b, te_opcode op, int a) { return emit_full(b, op, TE_RATE_ROW, 0, 0, a, -1, -1); }

static inline int input(built *b, te_rate rate)
{
    int slot = b->program.n_inputs++;
    b->input_rates[slot] = (uint8_t)rate;
    return emit_full(b, TE_PW_LOAD, rate, slot, 0, -1, -1, -1);
}

static inline int param(built *b)
{
    return emit_full(b, TE_PW_PARAM, TE_RATE_UNIFORM, b->program.n_params++, 0, -1, -1, -1);
}

static inline void output(built *b, te_output_kind kind, int value)
{
    b->outputs[b->program.n_outputs++] = (struct te_program_output){(uint8_t)kind, value};
}

static inline void release(built *b)
{
    if (b->program.release_compiled) b->program.release_compiled(&b->program);
    CHECK(b->program.compiled == NULL);
}

/* All devices: each instruction set this machine has, with 1, 2 and 3 threads. */
static te_exec devices[3 * TE_CPU_ISA_COUNT];
static int     n_devices;

static inline void open_devices(void)
{
    te_exec probe = test_exec_open(1);
    int     best = te_cpu(&probe)->isa;
    test_exec_close(&probe);
    for (int isa = 0; isa <= best; isa++)
        for (int threads = 1; threads <= 3; threads++) {
            devices[n_devices] = test_exec_open(threads);
            te_cpu(&devices[n_devices++])->isa = (te_cpu_isa)isa;
        }
}

static inline void close_devices(void)
{
    for (int d = 0; d < n_devices; d++) test_exec_close(&devices[d]);
}

#endif
