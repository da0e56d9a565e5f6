# The guest of a migration that is measured: a boot sector that fills memory with pseudo-random numbers, each so many times,
# from 1 MiB on, and then either stands still or changes so many pages 100 times a second, one after another.
#
#   as --32 guest.S -o guest.o && ld -m elf_i386 -Ttext 0x7c00 --oformat binary guest.o -o guest.bin
#
# crates/lab/src/migration/guest.rs has the result. The numbers at the end are written over there.

    .code16
    .globl _start
_start:
    cli
    xorw    %ax, %ax
    movw    %ax, %ds
    movw    %ax, %ss
    movw    $0x7c00, %sp
    inb     $0x92, %al              # address line 20
    orb     $2, %al
    andb    $0xfe, %al
    outb    %al, $0x92

    lgdtl   table                   # fs reaches all addresses, and keeps that in real mode
    movl    %cr0, %eax
    orb     $1, %al
    movl    %eax, %cr0
    movw    $8, %bx
    movw    %bx, %fs
    andb    $0xfe, %al
    movl    %eax, %cr0
    ljmp    $0, $fill

fill:
    movl    $0x100000, %edi
    movl    pages, %ecx
    shll    $10, %ecx               # numbers of 4 bytes
    movl    $0x9e3779b9, %eax
next:                               # xorshift of 32 bits
    movl    %eax, %edx
    shll    $13, %edx
    xorl    %edx, %eax
    movl    %eax, %edx
    shrl    $17, %edx
    xorl    %edx, %eax
    movl    %eax, %edx
    shll    $5, %edx
    xorl    %edx, %eax
    movl    repeats, %ebp
same:
    movl    %eax, %fs:(%edi)
    addl    $4, %edi
    decl    %ecx
    jz      filled
    decl    %ebp
    jnz     same
    jmp     next

filled:
    cmpl    $0, changes
    jne     change
still:
    hlt                             # interrupts are off: for good
    jmp     still

change:
    movw    $tick, 0x20             # the timer's interrupt, 100 times a second, and no other
    movw    $0, 0x22
    movb    $0xfe, %al
    outb    %al, $0x21
    movb    $0xff, %al
    outb    %al, $0xa1
    movb    $0x34, %al
    outb    %al, $0x43
    movb    $(11932 & 0xff), %al
    outb    %al, $0x40
    movb    $(11932 >> 8), %al
    outb    %al, $0x40
again:
    movl    $0x100000, %edi
    movl    pages, %ecx
page:
    decl    left
    jns     one
    movl    changes, %eax
    movl    %eax, left
    sti
    hlt
    cli
    jmp     page
one:
    incl    %fs:(%edi)
    addl    $4096, %edi
    decl    %ecx
    jnz     page
    jmp     again

tick:
    pushw   %ax
    movb    $0x20, %al
    outb    %al, $0x20
    popw    %ax
    iretw

left:       .long 0
    .balign 8
descriptors:
    .quad   0
    .quad   0x00cf92000000ffff      # data, from 0, 4 GiB
table:
    .word   table - descriptors - 1
    .long   descriptors

    .org    498
repeats:    .long 0                 # of each number
pages:      .long 0                 # that are filled
changes:    .long 0                 # pages in a hundredth of a second
    .word   0xaa55
