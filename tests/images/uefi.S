# The guest of the tests of what UEFI firmware starts from: a program of UEFI in the format PE32+, which firmware loads anywhere
# in memory. It says on the serial line what it was started from, a text that the test puts behind it, and resets the machine
# when it hears the letter `b` there. It uses nothing of the firmware.

.code64
image:
    .ascii "MZ"
    .org 0x3c
    .long pe - image
pe:
    .ascii "PE\0\0"
    # x86-64, one section, no symbols; it can be executed, anywhere: it has no relocations, and none were taken out.
    .short 0x8664, 1
    .long 0, 0, 0
    .short sections - optional, 0x22
optional:
    # PE32+, of no linker's version, with one page of code.
    .short 0x20b, 0
    .long 0x1000, 0, 0
    .long _start - image, code - image
    # Its address, and pages and sectors as units.
    .quad 0
    .long 0x1000, 0x200
    # Versions of what it would be for.
    .short 0, 0, 0, 0, 0, 0
    .long 0
    # Two pages, of which headers have the first; no checksum.
    .long 0x2000, 0x1000, 0
    # An application of UEFI. The firmware's stack does.
    .short 10, 0
    .quad 0, 0, 0, 0
    # Six directories, the last of which is that of relocations; all are empty.
    .long 0, 6
    .quad 0, 0, 0, 0, 0, 0
sections:
    .ascii ".text\0\0\0"
    .long 0x1000, code - image, 0x1000, code - image
    .long 0, 0
    .short 0, 0
    # Code, to be read and executed.
    .long 0x60000020

    .org 0x1000
code:
.globl _start
_start:
    # The firmware reads the line for itself otherwise.
    cli
    cld
    leaq started(%rip), %rsi
say:
    lodsb
    testb %al, %al
    jz wait
    movb %al, %bl
    movw $0x3fd, %dx
full:
    inb %dx, %al
    testb $0x20, %al
    jz full
    movb %bl, %al
    movw $0x3f8, %dx
    outb %al, %dx
    jmp say
wait:
    pause
    movw $0x3fd, %dx
    inb %dx, %al
    testb $1, %al
    jz wait
    movw $0x3f8, %dx
    inb %dx, %al
    cmpb $'b', %al
    jne wait
    movw $0xcf9, %dx
    movb $2, %al
    outb %al, %dx
    movb $6, %al
    outb %al, %dx
    hlt

# The test's text follows, and a zero.
started: .ascii "\r\nVMSEAL-STARTED-FROM "
