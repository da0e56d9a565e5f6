# The guest of the tests of CD-ROM drives. Firmware loads it from a medium (El Torito, without emulation) and starts it. It
# says so on the serial line, and obeys the letters that it hears there: `r` reads a sector of whatever medium is in the
# drive and says the text in it, `b` resets the machine.

.code16
.globl _start
_start:
    cli
    cld
    xorw %ax, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movw $0x7c00, %sp
    movb %dl, drive
    movw $booted, %si
    call say
next:
    # Interrupts are off: the firmware reads the line for itself otherwise.
    cli
    movw $0x3fd, %dx
wait:
    pause
    inb %dx, %al
    testb $1, %al
    jz wait
    movw $0x3f8, %dx
    inb %dx, %al
    cmpb $'b', %al
    je reset
    cmpb $'r', %al
    jne next
    movb $0x42, %ah
    movb drive, %dl
    movw $packet, %si
    int $0x13
    movw $0x8000, %si
    jnc answer
    movw $nothing, %si
answer:
    call say
    jmp next
reset:
    movw $0xcf9, %dx
    movb $2, %al
    outb %al, %dx
    movb $6, %al
    outb %al, %dx
    hlt

# Says the text at %si, which ends with a zero.
say:
    lodsb
    testb %al, %al
    jz said
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
said:
    ret

drive:   .byte 0
booted:  .asciz "\r\nVMSEAL-STARTED-FROM-MEDIUM\r\n"
nothing: .asciz "VMSEAL-READ nothing\r\n"
.balign 4
# One sector, to 0x8000, from sector 20.
packet:  .byte 16, 0
         .word 1, 0x8000, 0
         .quad 20
