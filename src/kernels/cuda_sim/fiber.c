/* fiber.c - on x86-64 a switch pushes the registers that a call keeps, changes the stack pointer and pops the others';
 * elsewhere ucontext does it, with a system call each time. */
#include "fiber.h"

#if defined(__x86_64__)

#include <stdint.h>

void te_fiber_exchange(void **save, void *next);

__asm__(".text\n"
        ".hidden te_fiber_exchange\n"
        ".globl te_fiber_exchange\n"
        ".type te_fiber_exchange, @function\n"
        "te_fiber_exchange:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size te_fiber_exchange, . - te_fiber_exchange\n");

/* Six registers, the entry that `ret` goes to, and the return address that a called function expects above itself. */
void te_fiber_prepare(te_fiber *fiber, void *stack, size_t size, void (*entry)(void))
{
    uintptr_t  top = ((uintptr_t)stack + size) & ~(uintptr_t)15;
    uintptr_t *at = (uintptr_t *)top - 8;
    for (int i = 0; i < 8; i++) at[i] = 0;
    at[6] = (uintptr_t)entry;
    fiber->stack_pointer = at;
}

void te_fiber_switch(te_fiber *from, te_fiber *to) { te_fiber_exchange(&from->stack_pointer, to->stack_pointer); }

#else

void te_fiber_prepare(te_fiber *fiber, void *stack, size_t size, void (*entry)(void))
{
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stack;
    fiber->context.uc_stack.ss_size = size;
    fiber->context.uc_link = NULL;
    makecontext(&fiber->context, entry, 0);
}

void te_fiber_switch(te_fiber *from, te_fiber *to) { swapcontext(&from->context, &to->context); }

#endif
